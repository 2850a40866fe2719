"""How models write tool calls: one layout and one response template per family."""
