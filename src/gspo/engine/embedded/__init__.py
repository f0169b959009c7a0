"""The engine that decodes in the process that trains."""
