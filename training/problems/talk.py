"""What people say that is no problem in arithmetic, and what a model answers to it."""

from __future__ import annotations

import random

from srm.training.problems.patterns import fill
from srm.training.problems.story import dress
from srm.training.problems.words import GOODS, PLACES, THINGS, name, thing

ANSWER = (
    "I only solve word problems in arithmetic. Ask me how many apples are left, or what a sum is."
)
"""It has no number, and no mark before one."""

_COUNTRIES = (
    "France Germany Italy Spain Japan China India Brazil Canada Egypt Kenya Norway Sweden Poland "
    "Greece Turkey Mexico Peru Chile Australia England Ireland Portugal Russia America Europe"
).split()
_TOPICS = (
    "[love|life|music|history|football|space|the moon|the sun|the sea|the weather|physics|biology|"
    "art|politics|a robot|dragons|cats|dogs|your day|the stars|winter|spring|cooking|computers|"
    "mathematics|school|trains|{things}|{somebody}|{country}]"
)
_SENTENCES = (
    "[Hello|Hi|Hey|Good morning|Good evening|Hi there|Hello there|Greetings|Yo][|!|.|, how are "
    "you?|, {somebody}!]",
    "[How are you|How are you doing|How is it going|What's up|How do you feel][| today]?",
    "[Who|What] are you?",
    "[What is|What's|Tell me] your name[?|.]",
    "Are you [a robot|human|a person|an AI|real|alive|a bot|smart]?",
    "[What can you do|What do you know|How do you work|What can I ask[| you]|Can you help "
    "me|What are you for|Who made you|Who built you|Where are you from|How old are you]?",
    "[Thanks|Thank you|Thank you very much|Bye|Goodbye|See "
    "you|OK|Okay|Great|Cool|Nice|Yes|No|Sorry|Wow|Good job|Well done][|!|.]",
    "[Tell me|Do you know|Can you tell me|I want to hear] [a joke|a good joke|a story|a fairy "
    "tale|a secret|something|a fun fact|something funny|something nice|a riddle][|?|.| about "
    "{topic}]",
    "[What|Where|Which city] is the capital of {country}?",
    "[What is|Tell me|Name] the capital [city |]of {country}[?|.]",
    "[Where|What] is {country}?",
    "[Who is|Who was] [the president of {country}|the king of "
    "{country}|{somebody}|Einstein|Shakespeare|the first man on the moon]?",
    "Write [a poem|a song|a story|an essay|a letter|a haiku|a text|an email][| about {topic}| "
    "for {somebody}][.|]",
    "[Write|Make|Show me] [a program|a function|code|a script] [in Python|in Java|in C|that "
    "sorts a list|that prints hello][.|]",
    "[Translate|Say] [this|hello|good morning|{things}|I love you|the word {good}] [into|in] "
    "[French|German|Spanish|Latin|Italian][.|]",
    "[What is|What's|How is] the weather [like |][today|in {country}|tomorrow|there]?",
    "[Will it|Does it] rain [today|tomorrow|in {country}]?",
    "[What is|Explain|Tell me about|Describe|Talk about|What do you think about|What do you know "
    "about|Do you like|Do you know] {topic}[?|.]",
    "Why [is the sky blue|is the grass green|do birds sing|do we sleep|is snow white|is the sea "
    "salty|are {things} round|do people like {things}|is {country} famous|do cats purr]?",
    "[When|Where] [was {somebody} born|did the war end|does {somebody} live|did dinosaurs "
    "live|is Christmas|can I buy a {good}|do {things} come from]?",
    "How [do I|can I|do you] [bake a cake|cook rice|learn English|make {things}|get to "
    "{country}|write a letter|lose weight|sleep better|fix a {good}|find a friend]?",
    "[What is|What's] the [meaning of life|largest animal|longest river|highest mountain|best "
    "film|colour of the sky|time|date|news|speed of light|biggest city]?",
    "[I am|I'm|I feel] [sad|happy|tired|bored|hungry|angry|lonely|fine|sick][| today][.|!]",
    "[I|We] [like|love|hate] {topic}[.|!]",
    "Who [wrote Hamlet|painted the Mona Lisa|won the match|invented the telephone|discovered "
    "America|is your father|ate the {things}]?",
    "[What colour|What kind|What sort] [are {things}|is a {good}]?",
    "What [are {things} made of|do {things} look like|does a {good} look like|is a {good}|can I "
    "do with {things}]?",
    "[Where|Why] [are|is] [my {good}|the {things}|{somebody}]?",
    "[Should|Can|May] I [eat {things}|buy a {good}|go to {country}|marry {somebody}|go home]?",
    "[Recommend|Suggest|Name] [a book|a film|a song|a game|a restaurant|a present for "
    "{somebody}|a city in {country}][.|]",
    "Is [{somebody} nice|{country} beautiful|the earth flat|it late|a tomato a fruit|water "
    "wet|{country} big|a {good} expensive]?",
    "{somebody} has some {things}.",
    "{somebody} is {place}.",
    "{somebody} likes {things}. [Why|Do you|What do you like]?",
    "I [have|lost|bought|see] a {good}[.|!]",
    "[Play|Sing|Draw|Summarise|Correct|Read|Open|Stop|Repeat|Continue|Help|Search|Test][| this| "
    "it| that| a {good}| please][|.|!]",
    "[blah|asdf|hmm|lol|test|foo|ok|what|why|huh|haha|please|nothing|???|...]",
    "[Let's|Let us] [talk|chat|play a game|play chess|go {place}|talk about {topic}][.|]",
    "[What is|What's] your favourite [colour|food|animal|number|book|film|song|city|{good}]?",
    "[Do|Can] you [speak German|speak French|sing|dance|dream|think|see me|hear me|swim|drive a "
    "car|love me|cook]?",
    "How [far is the moon|big is the sun|tall is {somebody}|deep is the sea|long is a day|far is "
    "{country}|rich is {somebody}|heavy is an elephant|many people live in {country}|many stars "
    "are there|fast is light]?",
)


def talk(r: random.Random) -> str:
    """Return something that is no problem."""
    words = {"things": thing(r) if r.random() < 0.3 else r.choice(THINGS), "somebody": name(r)}
    words |= {"good": r.choice(GOODS), "country": r.choice(_COUNTRIES), "place": r.choice(PLACES)}
    words["topic"] = fill(r, _TOPICS, words)
    return dress(r, fill(r, r.choice(_SENTENCES), words))
