"""AWS Trainium: installed packages, instances, and the backends that train on them."""
