"""What requests and answers look like; a request with a field that is not here is refused."""
