"""Code that needs a separate extra and that nothing else imports: an executor on a Ray cluster."""
