"""The functions that the split `train` offers, by domain."""

from __future__ import annotations

from typing import Final

from agentrl_environments.calls import vocabulary as words
from agentrl_environments.calls.functions import Choice, Flag, Real, Record, Several, Text, Whole, choice, function
from agentrl_environments.calls.functions import Parameter as _P

GARDEN: Final = (
    function(
        "water_bed irrigate_bed sprinkle_plot",
        "Water one bed of the garden.|Open the valve of a garden bed for some time.",
        "water the {bed} bed for {minutes} minutes|give the {bed} bed {minutes} minutes of water",
        _P("bed bed_name plot", Text(words.BED), "Name of the bed|Which bed, by its name"),
        _P("minutes duration_minutes run_minutes", Whole(3, 40), "How many minutes the valve stays open"),
        _P(
            "rain_tank use_rainwater",
            Flag("from the rain tank", "from the tap"),
            "Whether to use the rain tank",
            " {}",
            False,
        ),
    ),
    function(
        "plan_planting schedule_sowing note_planting",
        "Put a crop into the planting plan.|Plan on which day a crop is planted.",
        "plan {rows} rows of {crop} for {day}|put {rows} rows of {crop} into the plan for {day}",
        _P("crop plant vegetable", Text(words.CROP), "What is planted"),
        _P("rows row_count", Whole(2, 12), "Number of rows"),
        _P("day date planting_day", Text(words.DAY), "Day as YYYY-MM-DD"),
    ),
    function(
        "log_harvest record_harvest note_yield",
        "Record the weight of a harvest.|Write a harvest into the garden book.",
        "record a harvest of {kilos} kilos of {crop}|note that I picked {kilos} kg of {crop}",
        _P("crop produce", Text(words.CROP), "What was harvested"),
        _P("kilos weight_kg amount_kg", Real(1, 30), "Weight in kilograms"),
        _P("quality grade", choice("poor fair excellent"), "How good the harvest is", " of {} quality", "fair"),
    ),
    function(
        "order_seeds buy_seed_packets request_seeds",
        "Order packets of seeds.|Buy seeds of several crops.",
        "order {packets} packets each of {crops} seeds|buy seeds of {crops}, {packets} packets of each",
        _P("crops seeds kinds", Several(Text(words.CROP)), "The crops, in the order of the request"),
        _P("packets packets_each", Whole(2, 9), "Packets of each crop"),
    ),
)

LIBRARY: Final = (
    function(
        "set_book_aside hold_book place_hold",
        "Reserve a book for a reader.|Put a book on hold.",
        "reserve the book {title} for {reader}|put {title} on hold for {reader}",
        _P("title book book_title", Text(words.BOOK), "Title of the book"),
        _P("reader member patron", Text(words.PERSON), "Full name of the reader"),
        _P("branch pickup_branch", Text(words.TOWN), "Branch where it is fetched", " at the {} branch", "main"),
    ),
    function(
        "renew_loan extend_loan prolong_loan",
        "Extend a loan.|Give a reader more weeks for a borrowed item.",
        "extend loan {loan} by {weeks} weeks|renew loan {loan} for {weeks} more weeks",
        _P("loan loan_id loan_number", Text(words.code("L")), "Number of the loan"),
        _P("weeks extra_weeks", Whole(2, 8), "How many weeks are added"),
    ),
    function(
        "search_shelf find_books browse_catalogue",
        "Search the catalogue by subject.|Find items of the library about a subject.",
        "look for {format} items about {subject}|search the catalogue for {format} items on {subject}",
        _P("subject topic theme", Text(words.SUBJECT), "What the items are about"),
        _P("format medium", choice("print audio large_print"), "Form of the items"),
        _P("limit most max_results", Whole(3, 30), "Most entries of the result", " and show at most {}", 50),
    ),
    function(
        "register_reader enrol_patron add_member",
        "Register a new reader.|Add a person to the readers of the library.",
        "register {reader.name}, aged {reader.age}, as a reader|"
        "sign up {reader.name}, who is {reader.age} years old, for a library card",
        _P(
            "reader person applicant",
            Record(
                (_P("name full_name", Text(words.PERSON), "Full name"), _P("age years", Whole(13, 90), "Age in years"))
            ),
            "The new reader",
        ),
        _P(
            "newsletter wants_news",
            Flag("with the newsletter", "without the newsletter"),
            "Whether to send the newsletter",
            " {}",
            False,
        ),
    ),
)

RAIL: Final = (
    function(
        "find_trains list_connections search_rail",
        "List trains between two towns on a day.|Find rail connections.",
        "find trains from {origin} to {target} on {day}|list the trains that go from {origin} to {target} on {day}",
        _P("origin start from_town", Text(words.TOWN), "Town of departure"),
        _P("target destination to_town", Text(words.TOWN), "Town of arrival"),
        _P("day date travel_day", Text(words.DAY), "Day as YYYY-MM-DD"),
        _P(
            "direct only_direct",
            Flag("without a change", "with changes allowed"),
            "Only trains without a change",
            " {}",
            False,
        ),
    ),
    function(
        "book_seat reserve_seat take_seat",
        "Book a seat in a train.|Reserve a place for a passenger.",
        "book a {place} seat in train {train} for {passenger}|"
        "reserve a seat by the {place} in train {train} for {passenger}",
        _P("train train_number", Text(words.code("R")), "Number of the train"),
        _P("passenger traveller", Text(words.PERSON), "Full name of the passenger"),
        _P("place position seat_kind", choice("window aisle table"), "Where the seat is"),
    ),
    function(
        "report_lost_item file_loss lost_property",
        "Report an item that was left in a train.|File a report of a lost item.",
        "report that I left my {item} in train {train}|file a loss: my {item} stayed in train {train}",
        _P("item object_lost", Text(words.THING), "What was lost"),
        _P("train train_number service", Text(words.code("R")), "Number of the train"),
    ),
    function(
        "platform_of show_platform track_number",
        "Tell from which platform a train leaves.|Look up the platform of a train at a station.",
        "tell me from which platform train {train} leaves {station}|look up the platform of train {train} in {station}",
        _P("train train_number", Text(words.code("R")), "Number of the train"),
        _P("station stop town", Text(words.TOWN), "The station, by its town"),
    ),
)

KITCHEN: Final = (
    function(
        "scale_recipe adapt_recipe resize_recipe",
        "Compute a recipe for another number of people.|Scale the amounts of a recipe.",
        "scale the recipe for {dish} from {before} to {after} people|"
        "adapt the {dish} recipe for {before} people to {after}",
        _P("dish recipe meal", Text(words.DISH), "Name of the recipe"),
        _P("before from_people servings_now", Whole(1, 6), "People that the recipe is for"),
        _P("after to_people servings_new", Whole(7, 40), "People that it should be for"),
    ),
    function(
        "set_oven start_oven heat_oven",
        "Heat the oven.|Start the oven with a program.",
        "heat the oven to {degrees} degrees with {program} heat|set the oven to {degrees} degrees, {program} heat",
        _P("degrees temperature celsius", Whole(80, 250), "Temperature in degrees Celsius"),
        _P(
            "program mode",
            Choice({"fan": "fan", "top": "upper", "bottom": "lower", "both": "upper and lower"}),
            "fan, upper, lower or both kinds of heat",
        ),
        _P("minutes timer_minutes", Whole(5, 90), "Minutes until it is switched off; 0 is never", " for {} minutes", 0),
    ),
    function(
        "plan_meal add_to_menu schedule_dish",
        "Put a dish on the menu of a day.|Plan what is eaten on a day.",
        "put {dish} on the {meal} menu of {day}|plan {dish} for {meal} on {day}",
        _P("dish food", Text(words.DISH), "The dish"),
        _P("day date", Text(words.DAY), "Day as YYYY-MM-DD"),
        _P("meal course_of_day", choice("breakfast lunch dinner"), "Which meal"),
    ),
    function(
        "convert_amount cups_to_grams weigh_ingredient",
        "Convert cups of an ingredient to grams.|Tell what some cups of an ingredient weigh.",
        "convert {cups} cups of {ingredient} to grams|work out what {cups} cups of {ingredient} weigh",
        _P("ingredient substance", Text(words.INGREDIENT), "The ingredient"),
        _P("cups cup_count", Real(1, 9), "Number of cups"),
    ),
)

CLINIC: Final = (
    function(
        "book_visit make_appointment arrange_consultation",
        "Make an appointment with a doctor.|Arrange a visit at the clinic.",
        "make an appointment for {patient} on {day} at {time}|book a visit for {patient} at {time} on {day}",
        _P("patient patient_name", Text(words.PERSON), "Full name of the patient"),
        _P("day date", Text(words.DAY), "Day as YYYY-MM-DD"),
        _P("time hour start", Text(words.TIME), "Time as HH:MM"),
        _P("remote by_video", Flag("by video", "in person"), "Whether it is a video call", ", {}", False),
    ),
    function(
        "renew_prescription refill_medicine repeat_prescription",
        "Renew a prescription.|Order more of a medicine that a patient takes.",
        "renew the {medicine} prescription of {patient}|order more {medicine} for {patient}",
        _P("patient patient_name", Text(words.PERSON), "Full name of the patient"),
        _P("medicine drug", Text(words.MEDICINE), "Name of the medicine"),
        _P("packs boxes", Whole(2, 6), "Number of packs", ", {} packs", 1),
    ),
    function(
        "record_pressure log_blood_pressure note_pressure",
        "Record a blood pressure.|Write a blood pressure into the file of a patient.",
        "record a blood pressure of {upper} over {lower} for {patient}|"
        "note {upper} over {lower} as the blood pressure of {patient}",
        _P("patient patient_name", Text(words.PERSON), "Full name of the patient"),
        _P("upper systolic", Whole(100, 180), "The upper value"),
        _P("lower diastolic", Whole(55, 99), "The lower value"),
    ),
    function(
        "find_doctor search_specialist locate_doctor",
        "Find doctors of a field in a town.|Search for specialists.",
        "find a doctor for {field} in {town}|search for {field} specialists in {town}",
        _P(
            "field specialty",
            Choice(
                {"skin": "skin problems", "eyes": "eye problems", "heart": "heart problems", "bones": "bone problems"}
            ),
            "Field of the doctor",
        ),
        _P("town city place", Text(words.TOWN), "Where the doctor works"),
    ),
)

HOME: Final = (
    function(
        "set_heating adjust_radiator warm_room",
        "Set the temperature of a room.|Adjust the heating of a room.",
        "set the {room} to {degrees} degrees|adjust the heating in the {room} to {degrees} degrees",
        _P("room room_name", Text(words.ROOM), "The room"),
        _P("degrees temperature target_temperature", Real(15, 25), "Degrees Celsius"),
        _P("until end_time", Text(words.TIME), "Time as HH:MM when it goes back", " until {}", "23:00"),
    ),
    function(
        "dim_lights set_brightness adjust_lamps",
        "Set the brightness of the lamps in some rooms.|Dim the lights.",
        "dim the lights in the {rooms} to {percent} percent|set the lamps in the {rooms} to {percent} percent",
        _P("rooms places", Several(Text(words.ROOM)), "The rooms, in the order of the request"),
        _P("percent brightness level", Whole(5, 100), "Brightness from 0 to 100"),
    ),
    function(
        "arm_alarm activate_alarm secure_house",
        "Switch the alarm on.|Arm the alarm of the house.",
        "arm the alarm in {mode} mode at {time}|switch the alarm to {mode} mode at {time}",
        _P("mode alarm_mode", choice("night holiday perimeter"), "What the alarm watches"),
        _P("time start_time", Text(words.TIME), "Time as HH:MM"),
        _P("silent quiet", Flag("without a siren", "with a siren"), "Whether the siren stays off", " {}", False),
    ),
    function(
        "start_vacuum clean_floor run_robot",
        "Send the cleaning robot to a room.|Start the vacuum robot.",
        "send the robot to clean the {room} {passes} times|have the robot vacuum the {room} {passes} times",
        _P("room area", Text(words.ROOM), "The room to clean"),
        _P("passes repeats", Whole(2, 5), "How often it is cleaned"),
        _P("suction power", choice("gentle normal strong"), "Strength", " with {} suction", "normal"),
    ),
)

BANK: Final = (
    function(
        "transfer_money send_payment wire_funds",
        "Transfer money to somebody.|Send a payment from one account.",
        "send {amount} euros from account {account} to {payee}|"
        "transfer {amount} euros to {payee} from account {account}",
        _P("account source_account from_account", Text(words.code("A")), "Number of the paying account"),
        _P("payee recipient", Text(words.PERSON), "Full name of the recipient"),
        _P("amount euros sum_eur", Real(5, 900), "Amount in euros"),
        _P(
            "urgent instant",
            Flag("as an instant payment", "as a normal payment"),
            "Whether it is an instant payment",
            " {}",
            False,
        ),
    ),
    function(
        "exchange_cash quote_exchange change_currency",
        "Compute what an amount is in another currency.|Quote an exchange of money.",
        "tell me what {amount} {source} are in {target}|quote an exchange of {amount} {source} to {target}",
        _P("amount quantity", Whole(20, 5000), "The amount"),
        _P(
            "source from_currency sell",
            Choice({"EUR": "euros", "SEK": "Swedish crowns", "GBP": "British pounds"}),
            "Code of the currency that is sold",
        ),
        _P(
            "target to_currency buy",
            Choice({"USD": "US dollars", "CHF": "Swiss francs", "JPY": "yen"}),
            "Code of the currency that is bought",
        ),
    ),
    function(
        "freeze_card block_card lock_card",
        "Block a card.|Stop all payments with a card.",
        "block card {card} because it was {reason}|freeze my card {card}, it was {reason}",
        _P("card card_number card_id", Text(words.code("K")), "Number of the card"),
        _P("reason cause", choice("lost stolen damaged"), "Why it is blocked"),
        _P(
            "replace send_new_card",
            Flag("and send a new one", "and send no new one"),
            "Whether a new card is sent",
            " {}",
            False,
        ),
    ),
    function(
        "loan_rate monthly_instalment loan_payment",
        "Compute the monthly payment of a loan.|Tell what a loan costs each month.",
        "work out the monthly payment for a loan of {sum} euros over {years} years at {interest} percent|"
        "compute the instalment of a {sum} euro loan at {interest} percent for {years} years",
        _P("sum principal loan_amount", Whole(1000, 90000), "The loan in euros"),
        _P("years term_years", Whole(2, 30), "Years until it is paid back"),
        _P("interest rate_percent annual_rate", Real(1, 9), "Interest in percent a year"),
    ),
)

SCHOOL: Final = (
    function(
        "grade_average mean_of_grades average_marks",
        "Compute the average of grades.|Tell the mean of some marks in a course.",
        "compute the average of {grades} in {course}|work out the mean of the {course} grades {grades}",
        _P("grades marks", Several(Whole(1, 15), 5), "The grades, in the order of the request"),
        _P("course subject", Text(words.COURSE), "The course"),
    ),
    function(
        "enrol_pupil join_course add_pupil",
        "Enrol a pupil in a course.|Put a pupil on the list of a course.",
        "enrol {pupil} in {course}|put {pupil} on the list of the {course} course",
        _P("pupil student learner", Text(words.PERSON), "Full name of the pupil"),
        _P("course subject lesson", Text(words.COURSE), "The course"),
        _P("term semester", choice("spring summer autumn"), "Term of the course", " for the {} term", "summer"),
    ),
    function(
        "schedule_exam set_test_date plan_exam",
        "Set the date of an exam.|Plan an exam of a course.",
        "schedule a {minutes} minute exam in {course} on {day}|set an exam in {course} of {minutes} minutes for {day}",
        _P("course subject", Text(words.COURSE), "The course"),
        _P("day date exam_day", Text(words.DAY), "Day as YYYY-MM-DD"),
        _P("minutes length_minutes", Whole(30, 180), "Length in minutes"),
        _P("oral spoken", Flag("as an oral exam", "as a written exam"), "Whether it is oral", " {}", False),
    ),
    function(
        "note_absence excuse_pupil report_absence",
        "Note that a pupil is absent.|Excuse a pupil for some days.",
        "note that {pupil} is absent for {days} days from {day} on|excuse {pupil} for {days} days from {day} on",
        _P("pupil student", Text(words.PERSON), "Full name of the pupil"),
        _P("day first_day since", Text(words.DAY), "First day as YYYY-MM-DD"),
        _P("days day_count", Whole(2, 10), "Number of days"),
    ),
)

MUSIC: Final = (
    function(
        "queue_songs add_to_queue line_up_songs",
        "Add songs to the queue of a speaker.|Line up songs to be played.",
        "queue {songs} in the {room}|add {songs} to the queue of the {room} speaker",
        _P("songs tracks titles", Several(Text(words.SONG)), "Titles, in the order of the request"),
        _P("room speaker", Text(words.ROOM), "Room of the speaker"),
        _P(
            "shuffle random_order",
            Flag("in random order", "in this order"),
            "Whether to play in random order",
            " {}",
            False,
        ),
    ),
    function(
        "make_playlist mix_of_artist new_playlist",
        "Make a playlist of an artist.|Create a playlist with songs of one artist.",
        "make a playlist of {count} songs by {artist}|create a mix with {count} songs of {artist}",
        _P("artist performer band", Text(words.ARTIST), "The artist"),
        _P("count song_count size", Whole(5, 60), "Number of songs"),
        _P("mood feeling", choice("calm cheerful sad any"), "Mood of the songs", " in a {} mood", "any"),
    ),
    function(
        "tuning_tone tuning_help give_pitch",
        "Help to tune an instrument.|Play the reference tone for an instrument.",
        "help me tune my {instrument} to {hertz} hertz|give me {hertz} hertz to tune a {instrument}",
        _P("instrument kind", Text(words.INSTRUMENT), "The instrument"),
        _P("hertz frequency reference_hz", Whole(415, 466), "Frequency of the tone A"),
    ),
    function(
        "look_for_concerts search_gigs list_shows",
        "Find concerts of an artist.|Search for shows in a town.",
        "find concerts of {artist} in {town}|search for shows by {artist} in {town}",
        _P("artist performer", Text(words.ARTIST), "The artist"),
        _P("town city venue_town", Text(words.TOWN), "Where the concert is"),
        _P("budget max_price", Whole(20, 150), "Highest price of a ticket in euros", " for at most {} euros", 200),
    ),
)

CARPENTRY: Final = (
    function(
        "tank_volume box_capacity inner_volume",
        "Compute the volume of a box.|Tell how many litres a box holds.",
        "compute the volume of a box of {length} by {width} by {height} cm|"
        "tell me how much a box of {length} by {width} by {height} cm holds",
        _P("length long_side", Whole(20, 200), "First side in cm"),
        _P("width short_side", Whole(20, 200), "Second side in cm"),
        _P("height depth", Whole(20, 200), "Third side in cm"),
    ),
    function(
        "cut_planks order_cuts saw_boards",
        "Order planks that are cut to length.|Have boards sawn.",
        "order {count} {wood} planks of {length} cm|have {count} boards of {wood} cut to {length} cm",
        _P("wood material", choice("oak pine birch walnut"), "The wood"),
        _P("count pieces", Whole(2, 40), "Number of planks"),
        _P("length length_cm", Real(30, 300), "Length in cm"),
        _P(
            "sanded smooth", Flag("with a sanded face", "with a rough face"), "Whether the face is sanded", " {}", False
        ),
    ),
    function(
        "paint_needed paint_litres estimate_paint",
        "Estimate the paint for a wall.|Tell how many litres of paint a wall takes.",
        "estimate the paint for a wall of {area} square metres in {coats} coats|"
        "tell me how much paint {coats} coats on {area} square metres take",
        _P("area square_metres surface", Real(4, 120), "Area in square metres"),
        _P("coats layers", Whole(2, 4), "Number of coats"),
    ),
    function(
        "beam_load max_load bearing_weight",
        "Tell what weight a beam bears.|Compute the load of a beam of a material.",
        "tell me what a {material} beam of {span} metres bears|compute the load of a {span} metre beam of {material}",
        _P("material stuff", Text(words.MATERIAL), "What the beam is made of"),
        _P("span metres", Real(1, 9), "Length between the supports in metres"),
        _P("safety margin", Real(2, 5), "Safety factor", " with a safety factor of {}", 1.5),
    ),
)

POST: Final = (
    function(
        "parcel_price postage_of quote_parcel",
        "Tell what a parcel costs.|Compute the postage of a parcel to a town.",
        "tell me the price of a {kilos} kg parcel to {town}|compute the postage for {kilos} kilos to {town}",
        _P("kilos weight_kg", Real(1, 30), "Weight in kilograms"),
        _P("town destination to", Text(words.TOWN), "Where it goes"),
        _P("insured insurance", Flag("with insurance", "without insurance"), "Whether it is insured", " {}", False),
    ),
    function(
        "track_parcel locate_parcel where_is_parcel",
        "Tell where a parcel is.|Look a parcel up by its number.",
        "tell me where parcel {parcel} is|locate parcel {parcel}",
        _P("parcel parcel_number tracking_code", Text(words.code("P")), "Number of the parcel"),
    ),
    function(
        "redirect_mail forward_letters move_mail",
        "Send the mail of a person to another address.|Forward letters.",
        "forward the mail of {person} to {address.street} in {address.town}|"
        "redirect letters for {person} to {address.street}, {address.town}",
        _P("person addressee name", Text(words.PERSON), "Full name of the person"),
        _P(
            "address new_address",
            Record(
                (
                    _P("street street_line", Text(words.ADDRESS), "Number and street"),
                    _P("town city", Text(words.TOWN), "Town"),
                )
            ),
            "Where the mail goes",
        ),
        _P("weeks duration_weeks", Whole(2, 26), "For how many weeks", " for {} weeks", 52),
    ),
    function(
        "request_pickup fetch_parcels arrange_pickup",
        "Have parcels fetched.|Arrange that the post fetches parcels at an address.",
        "have {count} parcels fetched at {street} on {day}|arrange a pickup of {count} parcels at {street} on {day}",
        _P("street address street_line", Text(words.ADDRESS), "Number and street"),
        _P("day date pickup_day", Text(words.DAY), "Day as YYYY-MM-DD"),
        _P("count parcels", Whole(2, 20), "Number of parcels"),
    ),
)

SPORT: Final = (
    function(
        "log_run record_run save_workout",
        "Record a run.|Save a run in the training diary.",
        "record a run of {kilometres} kilometres in {minutes} minutes|"
        "save that I ran {kilometres} km in {minutes} minutes",
        _P("kilometres distance_km", Real(2, 42), "Distance in kilometres"),
        _P("minutes duration", Whole(12, 240), "Time in minutes"),
        _P("surface ground", choice("road trail track"), "Where the run was", " on a {}", "road"),
    ),
    function(
        "book_court reserve_hall rent_court",
        "Book a court.|Reserve a court of a sports hall.",
        "book a {sport} court on {day} at {time}|reserve a court for {sport} at {time} on {day}",
        _P("sport game", choice("tennis squash badminton"), "The sport"),
        _P("day date", Text(words.DAY), "Day as YYYY-MM-DD"),
        _P("time start_time", Text(words.TIME), "Time as HH:MM"),
        _P("players player_count", Whole(3, 8), "Number of players", " for {} players", 2),
    ),
    function(
        "sign_up_team register_team enter_league",
        "Enter a team for a league.|Register a team with its captain.",
        "sign up the {team} with {captain} as captain|register the team {team}, captain {captain}",
        _P("team team_name", Text(words.TEAM), "Name of the team"),
        _P("captain leader", Text(words.PERSON), "Full name of the captain"),
        _P("colours shirts", Several(choice("red blue green white black"), 2), "Colours of the shirts", " in {}", []),
    ),
    function(
        "save_result enter_score post_score",
        "Enter the result of a match.|Save the score of two teams.",
        "enter {home} against {away} with {home_goals} to {away_goals}|"
        "save that {home} played {away} and it ended {home_goals} to {away_goals}",
        _P("home home_team host", Text(words.TEAM), "The team at home"),
        _P("away away_team guest", Text(words.TEAM), "The visiting team"),
        _P("home_goals goals_home", Whole(0, 9), "Goals of the team at home"),
        _P("away_goals goals_away", Whole(0, 9), "Goals of the visiting team"),
    ),
)

TRAIN: Final = {
    "garden": GARDEN,
    "library": LIBRARY,
    "rail": RAIL,
    "kitchen": KITCHEN,
    "clinic": CLINIC,
    "home": HOME,
    "bank": BANK,
    "school": SCHOOL,
    "music": MUSIC,
    "carpentry": CARPENTRY,
    "post": POST,
    "sport": SPORT,
}
