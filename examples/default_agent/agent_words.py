"""Word lists that `agent_values.py` draws from."""

from __future__ import annotations


def _words(text: str) -> list[str]:
    """The words of `text`, which are separated by bars."""
    return text.split("|")


FIRST_NAMES = _words(
    "Anna|Ben|Carla|David|Elena|Frank|Grace|Hugo|Irene|Jonas|Karin|Leo|Maria|Nils|Olga|Paul|"
    "Quentin|Rosa|Simon|Tara|Ursula|Victor|Wendy|Xavier|Yara|Zoe|Amir|Bianca|Chen|Dina|Emeka|"
    "Fatima|Goran|Hana|Ivan|Julia|Kofi|Lina|Mateo|Nadia|Oscar|Priya|Rahul|Sven|Thea|Umar|"
    "Vera|Walter|Yusuf|Zara|Aisha|Bruno|Clara|Diego|Erik|Farah|George|Helen|Ines|Jack"
)
LAST_NAMES = _words(
    "Adams|Becker|Costa|Duarte|Evans|Fischer|Garcia|Hughes|Ito|Jensen|Kowalski|Larsen|Moreau|"
    "Novak|Okafor|Patel|Quinn|Rossi|Schmidt|Tanaka|Ueda|Vargas|Weber|Young|Zhang|Ali|Brown|"
    "Chavez|Dubois|Eriksson|Ferrari|Gomez|Hansen|Ibrahim|Jones|Khan|Lopez|Meyer|Nguyen|Olsen|"
    "Park|Reyes|Silva|Turner|Vogel|Walker|Yilmaz|Bauer|Clark|Diaz"
)
MAIL_DOMAINS = _words(
    "example.com|example.org|example.net|mail.example.com|office.example|team.example.org"
)
CITIES = [
    *_words(
    "Oslo|Rome|Lima|Cairo|Tokyo|Paris|Berlin|Madrid|Dublin|Vienna|Prague|Warsaw|Athens|"
    "Lisbon|Helsinki|Stockholm|Zurich|Geneva|Munich|Hamburg|Milan|Naples|Seville|Porto|Lyon|"
    "Bergen|Krakow|Budapest|Bucharest|Sofia|Istanbul|Nairobi|Lagos|Accra|Tunis|Delhi|Mumbai|"
    "Chennai|Bangkok|Hanoi|Seoul|Osaka|Kyoto|Sydney|Perth|Auckland|Toronto|Montreal|"
    "Vancouver|Chicago|Boston|Denver|Seattle|Austin|Phoenix|Dallas|Miami|Atlanta|Bogota|"
    "Quito|Santiago"
),
    "New York", "San Francisco", "Los Angeles", "Buenos Aires", "Cape Town", "Hong Kong",
    "Tel Aviv", "Rio de Janeiro", "Mexico City", "San Diego", "New Orleans", "Salt Lake City",
]  # fmt: skip
COUNTRIES = _words(
    "Norway|Italy|Peru|Egypt|Japan|France|Germany|Spain|Ireland|Austria|Poland|Greece|"
    "Portugal|Finland|Sweden|Switzerland|Hungary|Turkey|Kenya|India|Thailand|Vietnam|Canada|"
    "Brazil|Mexico|Chile|Ghana|Morocco|Denmark|Iceland"
)
STREETS = [
    "Oak Street", "Maple Avenue", "King Street", "High Road", "Park Lane", "Mill Road",
    "Station Square", "Church Street", "Lake View", "Harbour Road", "Garden Way", "Hill Street",
    "River Walk", "Elm Court", "Market Place", "Bridge Street", "North Avenue", "Rose Lane",
]  # fmt: skip
MONTHS = _words(
    "January|February|March|April|May|June|July|August|September|October|November|December"
)
WEEKDAYS = _words("Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday")
TOPICS = _words(
    "Budget|Design|Sales|Release|Security|Hiring|Marketing|Roadmap|Travel|Training|Quality|"
    "Support|Research|Onboarding|Planning|Launch|Customer|Pricing|Website|Invoice|Contract|"
    "Inventory|Team|Project|Garden|Kitchen|School|Office|Winter|Summer"
)
MEETINGS = _words(
    "review|meeting|sync|workshop|call|update|session|lunch|check-in|interview|demo|briefing"
)
FILE_STEMS = _words(
    "report|notes|summary|draft|photo|backup|minutes|slides|invoice|letter|plan|data|results|"
    "log|todo|recipe|contract|schedule|manual|archive"
)
EXTENSIONS = _words("txt|pdf|csv|md|docx|json|log|xlsx|png|zip")
FOLDERS = _words(
    "docs|reports|photos|archive|projects|shared|backup|tmp|music|data|public|clients|tax|"
    "website|drafts|inbox|2024|2025"
)
PRODUCT_KINDS = _words(
    "red|blue|green|black|white|small|large|wooden|steel|cotton|leather|portable|cheap|"
    "organic|waterproof|wireless|folding|electric"
)
PRODUCTS = _words(
    "backpack|desk lamp|kettle|headphones|office chair|running shoes|umbrella|notebook|"
    "keyboard|jacket|bicycle helmet|water bottle|coffee machine|tent|pillow|watch|blender|"
    "toolbox|suitcase|bookshelf|camera bag|toaster|yoga mat|scarf"
)
FOODS = _words(
    "milk|bread|eggs|rice|apples|bananas|butter|cheese|coffee|tea|pasta|tomatoes|onions|"
    "yoghurt|chicken|salmon|lentils|spinach|oats|honey|olive oil|potatoes|carrots|beans"
)
ROOMS = _words(
    "kitchen|bedroom|living room|bathroom|office|hallway|garage|nursery|dining room|basement|attic"
)
SENTENCES = [
    "I will be {n} minutes late", "The {topic} files are ready", "Can we move the meeting to {day}",
    "Please call me back on {day}", "Thanks for the {topic} notes", "Lunch is at my place on {day}",
    "The train is delayed by {n} minutes", "Happy birthday to you", "I have sent {n} boxes",
    "See you on {day}", "The {topic} plan has changed", "We need {n} more chairs on {day}",
    "The server is back online", "Do not forget the keys", "Dinner is ready",
    "My flight lands on {day}", "The {topic} budget is approved", "I found your umbrella",
]  # fmt: skip
SONG_STARTS = _words(
    "Blue|Silver|Midnight|Summer|Golden|Quiet|Electric|Broken|Distant|Northern|Velvet|Paper|"
    "Wild|Lonely|Crystal|Burning"
)
SONG_ENDS = _words(
    "River|Rain|Road|Lights|Heart|Morning|Garden|Train|Ocean|Moon|Fire|Letters|Mirror|"
    "Harbour|Shadow|Dance"
)
BAND_STARTS = _words(
    "The Red|The Silent|Little|Royal|Northern|The Paper|Young|Neon|The Lost|Iron|Happy|Marble"
)
BAND_ENDS = _words(
    "Foxes|Towers|Pilots|Lions|Sisters|Engines|Islands|Gardeners|Wolves|Strangers|Clocks|Bridges"
)
COMPANY_ENDS = _words("Ltd|Group|Foods|Energy|Bank|Motors|Systems|Pharma|Media|Logistics")
CURRENCIES = _words("EUR|USD|GBP|JPY|CHF|SEK|NOK|DKK|PLN|CAD|AUD|INR|BRL|MXN|ZAR|TRY")
LANGUAGES = _words(
    "French|German|Spanish|Italian|Portuguese|Dutch|Polish|Swedish|Japanese|Korean|Arabic|"
    "Hindi|Turkish|Greek|Finnish|Czech"
)
TABLES = _words(
    "customers|orders|invoices|products|employees|payments|sessions|events|suppliers|tickets|"
    "shipments|reviews|accounts|projects"
)
CONDITIONS = [
    "sunny", "cloudy", "light rain", "heavy rain", "fog", "snow", "clear sky", "thunderstorms",
    "windy", "partly cloudy",
]  # fmt: skip
