"""Tests with Ray and an S3 server: `make test WHAT=ray` installs both in another environment."""
