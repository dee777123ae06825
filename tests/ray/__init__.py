"""Tests with Ray and an S3 server: `make test-ray` installs both, apart from the environment of the other tests."""
