"""AWS Trainium: what is installed, what the machines have, and the ways to train on them."""
