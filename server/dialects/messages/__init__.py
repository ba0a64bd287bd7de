"""Messages on the wire, as Anthropic's clients have them: requests, replies and events."""
