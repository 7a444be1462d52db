"""The functions that only the split `held_out` offers, by domain."""

from __future__ import annotations

from typing import Final

from agentrl_environments.calls import vocabulary as words
from agentrl_environments.calls.functions import Choice, Flag, Real, Record, Several, Text, Whole, choice, function
from agentrl_environments.calls.functions import Parameter as _P

HARBOUR: Final = (
    function(
        "assign_berth dock_ship allot_mooring",
        "Give a boat a berth.|Assign a mooring to a boat that arrives.",
        "give the {boat} berth {berth} for {nights} nights|assign berth {berth} to the {boat} for {nights} nights",
        _P("boat vessel ship_name", Text(words.BOAT), "Name of the boat"),
        _P("berth mooring", Whole(1, 60), "Number of the berth"),
        _P("nights stay_nights", Whole(2, 21), "How many nights it stays"),
        _P("power shore_power", Flag("with shore power", "without shore power"), "Whether it gets power", " {}", False),
    ),
    function(
        "tide_times high_water tide_table",
        "Tell the tides of a day.|Look up high and low water at a port.",
        "tell me the tides in {port} on {day}|look up high and low water in {port} on {day}",
        _P("port harbour location", Text(words.TOWN), "The port"),
        _P("day date", Text(words.DAY), "Day as YYYY-MM-DD"),
    ),
    function(
        "berth_fee mooring_price harbour_dues",
        "Compute the dues of a boat.|Tell what a boat of a length pays in the harbour.",
        "work out the dues of a {kind} of {metres} metres|tell me what a {kind} of {metres} metres pays",
        _P("metres length_m boat_length", Real(4, 40), "Length in metres"),
        _P("kind boat_type", choice("yacht ferry trawler"), "Kind of the boat"),
        _P("season time_of_year", choice("spring summer winter"), "Season of the price", " in {}", "spring"),
    ),
    function(
        "file_crew crew_manifest submit_crew",
        "File the list of a crew.|Submit who is on board of a boat.",
        "file {people} as the crew of the {boat}|submit a crew list for the {boat} with {people}",
        _P("boat vessel", Text(words.BOAT), "Name of the boat"),
        _P("people crew sailors", Several(Text(words.PERSON)), "Full names, in the order of the request"),
    ),
)

MUSEUM: Final = (
    function(
        "book_tour guided_tour arrange_tour",
        "Book a guided tour.|Arrange a tour for a group of visitors.",
        "book a tour in {language} for {visitors} people on {day}|"
        "arrange a {language} tour on {day} for {visitors} visitors",
        _P(
            "language tongue",
            Choice({"en": "English", "fr": "French", "de": "German", "it": "Italian"}),
            "Code of the language",
        ),
        _P("visitors group_size", Whole(4, 30), "Number of visitors"),
        _P("day date tour_day", Text(words.DAY), "Day as YYYY-MM-DD"),
    ),
    function(
        "sell_tickets issue_tickets buy_entry",
        "Sell tickets of the museum.|Issue entry tickets for a day.",
        "sell {adults} adult and {children} child tickets for {day}|"
        "issue tickets for {adults} adults and {children} children on {day}",
        _P("adults adult_count", Whole(2, 9), "Number of adults"),
        _P("children child_count", Whole(2, 9), "Number of children"),
        _P("day date", Text(words.DAY), "Day as YYYY-MM-DD"),
        _P("discount reduction_percent", Real(5, 50), "Discount in percent", " with {} percent off", 0),
    ),
    function(
        "lend_exhibit loan_object ship_exhibit",
        "Lend an exhibit to another museum.|Register that an object is lent.",
        "lend the {exhibit} to the museum in {town} for {months} months|"
        "register a loan of the {exhibit} to {town} for {months} months",
        _P("exhibit piece", Text(words.EXHIBIT), "The exhibit"),
        _P("town city borrower", Text(words.TOWN), "Town of the other museum"),
        _P("months duration_months", Whole(2, 24), "For how many months"),
    ),
    function(
        "place_exhibit hang_exhibit move_exhibit",
        "Put an exhibit into a hall.|Move an object to a place in the museum.",
        "move the {exhibit} to case {spot.case} in hall {spot.hall}|"
        "put the {exhibit} into hall {spot.hall}, case {spot.case}",
        _P("exhibit piece", Text(words.EXHIBIT), "The exhibit"),
        _P(
            "spot place position",
            Record(
                (
                    _P("hall room", Whole(1, 20), "Number of the hall"),
                    _P("case cabinet", Whole(21, 90), "Number of the case"),
                )
            ),
            "Where it goes",
        ),
        _P("guarded needs_guard", Flag("under guard", "without a guard"), "Whether a guard watches it", " {}", False),
    ),
)

GARAGE: Final = (
    function(
        "book_service plan_inspection schedule_repair",
        "Plan the service of a car.|Book a car in at the garage.",
        "book the {car} of {owner} in for {day}|plan a service of the {car} of {owner} on {day}",
        _P("car model vehicle", Text(words.CAR), "Model of the car"),
        _P("owner customer", Text(words.PERSON), "Full name of the owner"),
        _P("day date", Text(words.DAY), "Day as YYYY-MM-DD"),
        _P(
            "rental loan_car",
            Flag("with a replacement car", "without a replacement car"),
            "Whether a car is lent meanwhile",
            " {}",
            False,
        ),
    ),
    function(
        "order_tyres buy_tyres stock_tyres",
        "Order tyres.|Buy tyres of a kind for a car.",
        "order {count} {season} tyres for a {car}|buy {count} {season} tyres that fit a {car}",
        _P("car model", Text(words.CAR), "Model of the car"),
        _P("season kind", choice("winter summer all_season"), "Kind of the tyres"),
        _P("count quantity", Whole(2, 8), "Number of tyres"),
    ),
    function(
        "fuel_use consumption_of litres_per_distance",
        "Compute the fuel that a car uses.|Tell the consumption of a trip.",
        "work out the consumption for {litres} litres over {kilometres} kilometres|"
        "compute what the car uses, given {litres} litres for {kilometres} km",
        _P("litres fuel_litres", Real(3, 80), "Fuel in litres"),
        _P("kilometres distance_km", Whole(40, 900), "Distance in kilometres"),
    ),
    function(
        "read_fault explain_code diagnose_fault",
        "Explain the fault code of a car.|Look up what a code of the car's computer means.",
        "explain fault code {fault} of a {car}|look up what the code {fault} means for a {car}",
        _P("fault code fault_code", Text(words.code("F")), "The code"),
        _P("car model", Text(words.CAR), "Model of the car"),
    ),
)

OBSERVATORY: Final = (
    function(
        "point_telescope aim_telescope slew_telescope",
        "Point the telescope at a star.|Aim the telescope for some time.",
        "point the telescope at {star} for {seconds} seconds|aim at {star} and expose for {seconds} seconds",
        _P("star target", Text(words.STAR), "Name of the star"),
        _P("seconds exposure_s", Real(1, 120), "Exposure in seconds"),
        _P(
            "colour_filter filter",
            choice("clear red green blue"),
            "Filter in front of the camera",
            " through the {} filter",
            "clear",
        ),
    ),
    function(
        "moon_phase lunar_phase phase_on",
        "Tell the phase of the moon.|Look up how the moon looks on a day.",
        "tell me the phase of the moon on {day}|look up the moon of {day}",
        _P("day date night", Text(words.DAY), "Day as YYYY-MM-DD"),
    ),
    function(
        "rise_and_set star_rises visibility_of",
        "Tell when a star rises and sets.|Look up when a star can be seen from a town.",
        "tell me when {star} rises in {town} on {day}|look up when {star} can be seen from {town} on {day}",
        _P("star object_name", Text(words.STAR), "Name of the star"),
        _P("town site observer_town", Text(words.TOWN), "Where the observer is"),
        _P("day date", Text(words.DAY), "Day as YYYY-MM-DD"),
    ),
    function(
        "reserve_dome book_dome open_dome",
        "Reserve the dome for a group.|Book the dome of the observatory for an evening.",
        "reserve the dome for {people} people on {day} from {time} on|"
        "book the dome on {day} at {time} for {people} guests",
        _P("people guests", Whole(2, 25), "Number of people"),
        _P("day date evening", Text(words.DAY), "Day as YYYY-MM-DD"),
        _P("time start", Text(words.TIME), "Time as HH:MM"),
    ),
)

HELD_OUT: Final = {"harbour": HARBOUR, "museum": MUSEUM, "garage": GARAGE, "observatory": OBSERVATORY}
