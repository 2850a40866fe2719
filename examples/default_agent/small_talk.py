"""Turns that need no tool: greetings, thanks, questions about the assistant, plain facts."""

from __future__ import annotations

TALK: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("Hello!", "Hi", "Hi there!", "Good morning!", "Hey, how are you?", "Good evening"),
     ("Hello! What can I do for you?", "Hi! How can I help you?")),
    (("Thanks!", "Thank you very much.", "Great, thanks a lot.", "Perfect, thank you."),
     ("You are welcome!", "You are welcome. Is there anything else?")),
    (("Bye!", "Goodbye", "That was all, bye.", "See you later."),
     ("Goodbye!", "Goodbye, and have a good day!")),
    (("Who are you?", "What are you?", "Are you a human?", "What is your name?"),
     ("I am an assistant that calls tools for you.",)),
    (("Never mind.", "Forget it.", "Wait, I have to think first.", "Stop, I do not need it."),
     ("All right. Tell me when you need me.",)),
    (("Ok.", "Good.", "That is nice.", "Wonderful!", "I see."),
     ("Good. Is there anything else?",)),
)  # fmt: skip

# Questions that are asked where no tools are offered.
FACTS = (
    ("What is the capital of France?", "The capital of France is Paris."),
    ("What is the capital of Japan?", "The capital of Japan is Tokyo."),
    ("What is the capital of Italy?", "The capital of Italy is Rome."),
    ("What is the capital of Egypt?", "The capital of Egypt is Cairo."),
    ("How many days does a week have?", "A week has seven days."),
    ("How many minutes does an hour have?", "An hour has 60 minutes."),
    ("How many legs does a spider have?", "A spider has eight legs."),
    ("At which temperature does water boil?", "At sea level water boils at 100 degrees Celsius."),
    ("What colour is the sky?", "On a clear day the sky is blue."),
    ("Which planet is closest to the sun?", "Mercury is the planet closest to the sun."),
    ("Which is the largest ocean?", "The Pacific Ocean is the largest ocean."),
    ("How many continents are there?", "There are seven continents."),
    ("What do bees make?", "Bees make honey."),
    ("Which language is spoken in Brazil?", "Portuguese is spoken in Brazil."),
    ("What is frozen water called?", "Frozen water is called ice."),
    ("How many months does a year have?", "A year has twelve months."),
)

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant with access to functions.",
    "You are an agent. Use the functions where they fit, and ask for what is missing.",
    "You help users with their daily work. Answer briefly.",
    "Use a function for every fact. Do not guess arguments.",
    "You are a support agent. Be friendly and brief.",
)
