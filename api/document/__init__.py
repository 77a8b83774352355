"""The documentation that the service serves: the OpenAPI document and the page of problems."""
