"""Tools that are kept out of the training data: restaurants, library, car, school."""

from __future__ import annotations

from agent_values import (
    BOOK,
    CITY,
    DATE,
    ID,
    ISO_DATE,
    PERSON,
    TIME,
    TITLE,
    integer,
    number,
    one_of,
    some,
    word,
)  # fmt: skip
from tool_spec import Tool, may, need

_DISHES = word(["margherita", "ramen", "falafel", "lasagne", "dal", "tacos", "pho", "paella"])

RESTAURANTS = (
    Tool(
        "reserve_table", "Reserve a table in a restaurant.",
        (need("restaurant", word(["Luna", "Casa Verde", "The Oak", "Sakura", "Bella Vista"]),
              "name of the restaurant"),
         need("people", integer(1, 12), "number of people"), need("date", DATE, "date"),
         need("time", TIME, "time"), may("outside", one_of("yes", "no"), "a table outside")),
        ("reserve a table[ at {restaurant}][ for {people} people][ on {date}][ at {time}]"
         "[, outside{outside=yes}]",
         "We are {people} and want to eat at {restaurant} on {date} at {time}."),
        ("{people} hungry people arrive at {restaurant} on {date}, {time}.",),
        {"status": "reserved", "code": ID},
        ("Your table at {restaurant} is reserved, the code is {code}.",),
    ),
    Tool(
        "order_food", "Order dishes for delivery.",
        (need("dishes", some(_DISHES, 1, 3), "dishes"),
         need("street", word(["Oak Street 4", "Lake View 12", "Hill Street 31"]), "where to")),
        ("order {dishes}[ to {street}]", "I want {dishes} delivered to {street}."),
        ("bring {dishes} to {street}",),
        {"order_code": ID, "minutes": integer(15, 70)},
        ("{dishes} will arrive in {minutes} minutes. The code is {order_code}.",),
    ),
    Tool(
        "rate_restaurant", "Rate a restaurant with stars.",
        (need("restaurant", word(["Luna", "Casa Verde", "The Oak", "Sakura"]), "restaurant"),
         need("stars", integer(1, 5), "1 to 5")),
        ("rate {restaurant}[ with {stars} stars]", "give {restaurant} {stars} stars"),
        ("{restaurant} deserves {stars} stars.",),
        {"status": "saved", "average": number(1, 5, 1)},
        ("You gave {restaurant} {stars} stars. Its average is {average}.",),
        pairs=("Give {1.restaurant} {1.stars} stars and {2.restaurant} {2.stars} stars.",),
    ),
)  # fmt: skip

LIBRARY = (
    Tool(
        "search_books", "Search the catalogue of the library.",
        (need("author", PERSON, "author"), may("year", integer(1990, 2025), "year")),
        ("search books[ by {author}][ from {year}]", "Which books by {author} do you have?"),
        ("I love to read {author}. What is there[ from {year}]?",),
        {"book": BOOK, "book_code": ID},
        ("I found {count} books. The first is {book} ({book_code}).",), many="books",
        pairs=("Search books by {1.author} and by {2.author}.",),
    ),
    Tool(
        "borrow_book", "Borrow a book with a library card.",
        (need("book_code", ID, "code of the book"), need("card", ID, "library card"),
         may("weeks", integer(1, 6), "for how many weeks")),
        ("borrow {book_code}[ with card {card}][ for {weeks} weeks]",
         "lend me {book_code}[, my card is {card}]"),
        ("My card {card}, the book {book_code}.",),
        {"status": "borrowed", "due": ISO_DATE},
        ("{book_code} is yours until {due}.",),
    ),
    Tool(
        "renew_loan", "Renew the loan of a book.",
        (need("loan", ID, "id of the loan"),),
        ("renew the loan[ {loan}]", "I need more time for {loan}."),
        ("extend {loan}",),
        {"status": "renewed", "due": ISO_DATE},
        ("The loan {loan} runs until {due} now.",),
        pairs=("Renew the loans {1.loan} and {2.loan}.",),
    ),
)  # fmt: skip

CAR = (
    Tool(
        "get_charge", "Get the charge of the battery of a car.",
        (need("plate", ID, "number plate"),),
        ("check the battery of the car[ {plate}]", "How far can {plate} drive?"),
        ("Is {plate} charged?",),
        {"percent": integer(5, 100), "range_km": integer(20, 480)},
        ("{plate} has {percent} percent and can drive {range_km} km.",),
        pairs=("How full are the batteries of {1.plate} and {2.plate}?",),
    ),
    Tool(
        "find_charger", "Find a charging station.",
        (need("city", CITY, "city"), may("power", integer(11, 150, 11), "power in kW")),
        ("find a charging station[ in {city}][ with {power} kW]",
         "Where can I charge in {city}?"),
        ("My car needs electricity in {city}.",),
        {"station": word(["Station North", "Mall Garage", "Harbour Point"]), "free": integer(1, 8)},
        ("{station} in {city} has {free} free places.",),
    ),
    Tool(
        "set_climate", "Set the climate control of the car.",
        (need("degrees", integer(16, 26), "temperature in celsius"),
         may("seat_heating", one_of("on", "off"), "heating of the seats")),
        ("set the car to {degrees} degrees[ with seat heating {seat_heating}]",
         "It should be {degrees} degrees in my car."),
        ("warm the car up to {degrees} degrees",),
        {"status": "ok", "minutes": integer(2, 15)},
        ("The car will have {degrees} degrees in {minutes} minutes.",),
    ),
)  # fmt: skip

SCHOOL = (
    Tool(
        "enroll_student", "Enroll a student in a course.",
        (need("student", PERSON, "name of the student"),
         need("course", word(["Algebra", "Biology", "Drawing", "Latin", "Chemistry"]), "course")),
        ("enroll {student}[ in {course}]", "{student} wants to take {course}, sign them up"),
        ("Put {student} on the list for {course}.",),
        {"status": "enrolled", "seat": integer(1, 30)},
        ("{student} is enrolled in {course}, seat {seat}.",),
        pairs=("Enroll {1.student} and {2.student} in {course}.",),
    ),
    Tool(
        "get_grades", "Get the grades of a student.",
        (need("student", PERSON, "name of the student"),
         may("term", one_of("spring", "autumn"), "term")),
        ("show the grades[ of {student}][ for the {term} term]",
         "How did {student} do[ in the {term} term]?"),
        ("Is {student} a good pupil?",),
        {"average": number(1, 6, 1), "courses": integer(3, 9)},
        ("{student} has an average of {average} in {courses} courses.",),
        pairs=("Compare the grades of {1.student} and {2.student}.",),
    ),
    Tool(
        "create_quiz", "Create a quiz about a topic.",
        (need("title", TITLE, "title"), need("questions", integer(3, 20), "number of questions"),
         may("level", one_of("easy", "medium", "hard"), "difficulty")),
        ("create a[ {level}] quiz[ called {title}] with {questions} questions",
         "I need {questions} questions for the quiz {title}[, {level} level]."),
        ("My class writes the test {title}. Give me {questions} questions.",),
        {"status": "created", "quiz_id": ID},
        ("The quiz {title} has {questions} questions and the id {quiz_id}.",),
    ),
)  # fmt: skip
