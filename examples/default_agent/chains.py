"""Requests that need two calls one after the other: the second uses a field of the first result."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Chain:
    """`links` maps parameters of the second tool to fields of the first result, `same` to
    parameters of the first call. Requests name parameters as `{1.city}` and `{2.title}`."""

    first: str
    second: str
    links: dict[str, str]
    requests: tuple[str, ...]
    same: dict[str, str] = field(default_factory=dict)


TRAINING_CHAINS = (
    Chain("search_flights", "book_flight", {"flight_id": "flight_id"}, (
        "find a flight from {1.origin} to {1.destination} on {1.date} and book the first one for "
        "{2.passenger}",
        "book a seat for {2.passenger} on the first flight from {1.origin} to {1.destination} on "
        "{1.date}",
    )),
    Chain("find_contact", "send_email", {"recipient": "email"}, (
        'find the address of {1.person} and send a mail with the subject {2.subject}: '
        '"{2.message}"',
        'write a mail to {1.person}, subject {2.subject}: "{2.message}"',
    )),
    Chain("find_contact", "start_call", {"number": "phone"}, (
        "call {1.person}", "look up the number of {1.person} and call it",
        "I want to talk to {1.person} on the phone.",
    )),
    Chain("search_products", "create_order", {"product_id": "product_id"}, (
        "search for a {1.query} and order {2.quantity} pieces of the first result",
        "order {2.quantity} of the first {1.query} that you find[ under {1.max_price} euros]",
    )),
    Chain("search_files", "read_file", {"path": "path"}, (
        "find the file about {1.query} in {1.folder} and read it",
        "What does the file about {1.query} in {1.folder} say?",
    )),
    Chain("search_files", "move_file", {"path": "path"}, (
        "find the file about {1.query} in {1.folder} and move it to {2.folder}",
    )),
    Chain("search_emails", "send_email", {"recipient": "sender"}, (
        'find the mail about {1.query} and write to its sender, subject {2.subject}: '
        '"{2.message}"',
    )),
    Chain("find_employee", "find_record", {"record_id": "employee_id"}, (
        "look up {1.employee} and show the record of that id in {2.table}",
        "I need the record of the employee {1.employee} from the table {2.table}.",
    )),
    Chain("find_places", "get_coordinates", {"address": "address"}, (
        "find a {1.kind} in {1.city} and give me its coordinates",
        "What are the coordinates of a {1.kind} in {1.city}?",
    ), {"city": "city"}),
    Chain("create_order", "get_order_status", {"order_id": "order_id"}, (
        "order {1.quantity} pieces of {1.product_id} and tell me the status of the order",
    )),
    Chain("find_record", "find_contact", {"person": "owner"}, (
        "find out who owns record {1.record_id} in {1.table} and get me the contact",
        "How can I reach the owner of record {1.record_id} in {1.table}?",
    )),
    Chain("search_news", "send_message", {"message": "headline"}, (
        "find an article about {1.query} and send its headline to {2.recipient}",
        "send {2.recipient} the latest headline about {1.query}",
    )),
    Chain("convert_currency", "send_money", {"amount": "result"}, (
        "convert {1.amount} {1.from} to {1.to} and send the result to {2.recipient}",
    ), {"currency": "to"}),
)  # fmt: skip

HELD_OUT_CHAINS = (
    Chain("search_books", "borrow_book", {"book_code": "book_code"}, (
        "find a book by {1.author} and borrow the first one with card {2.card}",
        "My card is {2.card}. I want to borrow a book by {1.author}.",
    )),
    Chain("search_books", "create_note", {"title": "book"}, (
        'find a book by {1.author} and make a note under its title: "{2.message}"',
    )),
)  # fmt: skip
