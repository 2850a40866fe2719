"""All tools, by domain, and which domains are kept out of the training data."""

from __future__ import annotations

from dataclasses import replace

import domains_daily as daily
import domains_held_out as held_out
import domains_money as money
import domains_work as work
from tool_spec import Tool

_DOMAINS: dict[str, tuple[Tool, ...]] = {
    "weather": daily.WEATHER,
    "maps": daily.MAPS,
    "news": daily.NEWS,
    "music": daily.MUSIC,
    "health": daily.HEALTH,
    "home": daily.SMART_HOME,
    "mail": work.MAIL,
    "calendar": work.CALENDAR,
    "chat": work.MESSAGING,
    "files": work.FILES,
    "database": work.DATABASES,
    "hr": work.HR,
    "shop": money.SHOPPING,
    "travel": money.TRAVEL,
    "bank": money.BANKING,
    "maths": money.MATHS,
    "notes": money.NOTES,
    "restaurant": held_out.RESTAURANTS,
    "library": held_out.LIBRARY,
    "car": held_out.CAR,
    "school": held_out.SCHOOL,
}
HELD_OUT_DOMAINS = ("restaurant", "library", "car", "school")

TOOLS: dict[str, Tool] = {
    tool.name: replace(tool, domain=domain) for domain, tools in _DOMAINS.items() for tool in tools
}
TRAINING_TOOLS = [tool for tool in TOOLS.values() if tool.domain not in HELD_OUT_DOMAINS]
HELD_OUT_TOOLS = [tool for tool in TOOLS.values() if tool.domain in HELD_OUT_DOMAINS]
