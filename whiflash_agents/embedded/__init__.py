"""The embedded default model: where it comes from, how it gets onto this machine, and the chat and
response templates that go with it."""
