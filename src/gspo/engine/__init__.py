"""Engines: token ids in, token ids out. They know no query, text, group or reward."""
