"""The default agent: where its base model comes from and how it gets onto this machine, the chat
and response templates that go with it, and our adapter, drafters and routers for it (`agent/`)."""
