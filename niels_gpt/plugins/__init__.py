"""What needs an extra of its own and nothing else imports: an executor on a Ray cluster."""
