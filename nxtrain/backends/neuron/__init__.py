"""AWS Trainium: packages, instances, and the backends of both lanes."""
