"""HTTP transport: connections, requests, responses, errors, logs and metrics; knows no model."""
