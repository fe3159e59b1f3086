"""What a run tells about itself: throughput, the metrics file, TensorBoard events and the progress bar."""
