"""Make data sets ready for training: images and tokens in shards, and images drawn by a program."""
