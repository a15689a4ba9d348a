"""What happens before what: pipes, flags and barriers, followed without data."""
