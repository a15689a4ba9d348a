"""Complete models, and the jobs that train, run and export them."""
