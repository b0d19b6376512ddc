"""Names, places, things and words of which questions are made."""

from pathlib import Path
from typing import Final

# The commonest words of docstrings in the standard library, and some of daily life.
WORDS: Final = tuple(Path(__file__).with_name("words.txt").read_text("utf-8").split())

NAMES: Final = tuple(
    """Anna Ben Carla David Emma Felix Grace Henry Ida Jack Kate Leo Maria Noah Olivia Paul
    Quinn Rosa Sam Tina Uma Victor Wendy Xavier Yara Zoe Alice Bob Charlie Diana Eric Fiona
    George Hannah Ivan Julia Karl Laura Marco Nina Oscar Petra Ravi Sofia Tom Ursula Vera
    Will Yusuf Zara Ali Bianca Chen Daria Elena Fatima Gina Hugo Irene James John Jane Kim
    Linda Lucas Mia Michael Nora Omar Peter Rachel Robert Sarah Simon Stella Susan Thomas
    Mary Max Lisa Mark Lena Martin Eva Adam Amy Andrew Aisha Carlos Claire Dan""".split()
)
CITIES: Final = tuple(
    """Paris,London,Berlin,Rome,Madrid,Vienna,Prague,Warsaw,Lisbon,Dublin,Athens,Oslo,Stockholm,
    Helsinki,Copenhagen,Budapest,Zurich,Geneva,Munich,Hamburg,Milan,Naples,Barcelona,Porto,
    Lyon,Nice,Brussels,Amsterdam,Tokyo,Kyoto,Osaka,Seoul,Beijing,Shanghai,Delhi,Mumbai,Cairo,
    Nairobi,Lagos,Accra,Sydney,Melbourne,Auckland,Toronto,Montreal,Vancouver,New York,Boston,
    Chicago,Seattle,San Francisco,Los Angeles,Austin,Denver,Miami,Dallas,Lima,Bogota,Santiago,
    Buenos Aires,Rio de Janeiro,Mexico City,Havana,Istanbul,Ankara,Dubai,Tehran,Baghdad,
    Singapore,Bangkok,Hanoi,Manila,Jakarta,Kiev,Riga,Vilnius,Tallinn,Sofia,Belgrade,Zagreb,
    Cape Town,Tunis,Rabat,Dakar,Kampala,Leeds,York,Oxford,Bath,Bristol,Turin,Seville,Bremen,
    Leipzig,Dresden,Basel,Graz,Krakow,Utrecht,Ghent""".replace("\n", "").replace(", ", ",").split(",")
)  # fmt: skip
PLACES: Final = tuple(" ".join(city.split()) for city in CITIES)
THINGS: Final = tuple(
    """apples books pens coins cards stamps marbles eggs cookies shells stones flowers balls
    pencils oranges stickers candles keys cups plates shirts boxes bottles chairs tickets
    toys sweets nuts plums lemons photos buttons bags bricks potatoes""".split()
)
JOBS: Final = tuple(
    """teacher doctor nurse baker farmer pilot lawyer painter engineer writer plumber chef
    dentist driver gardener journalist carpenter librarian musician programmer scientist
    waiter tailor electrician photographer""".split()
)
COLORS: Final = tuple("red blue green yellow black white brown orange purple pink gray".split())
TOPICS: Final = tuple(
    """the Moon,gravity,black holes,dinosaurs,the French Revolution,World War II,the Roman Empire,
    photosynthesis,quantum mechanics,the stock market,inflation,democracy,the human brain,DNA,
    vaccines,climate change,the ocean,volcanoes,earthquakes,the internet,artificial intelligence,
    machine learning,neural networks,football,tennis,the Olympics,chess,cooking pasta,baking bread,
    yoga,sleep,coffee,wine,chocolate,dogs,cats,whales,elephants,bees,trees,roses,the piano,jazz,
    opera,Shakespeare,poetry,philosophy,Plato,religion,love,happiness,money,taxes,banks,bitcoin,
    electric cars,airplanes,trains,bridges,Egypt,China,Japan,Brazil,India,Canada,Russia,Germany,
    France,Italy,Spain,Mexico,Kenya,Australia,Africa,Antarctica,Europe,the Amazon,Mount Everest,
    the Nile,the Sun,Mars,Jupiter,Saturn,stars,galaxies,time travel,aliens,robots,ghosts,magic,
    history,geography,biology,chemistry,physics,medicine,law,economics,psychology,art,music,movies,
    television,newspapers,books,video games,fashion,marriage,children,schools,universities,work,
    sports,swimming,running,cycling,hiking,fishing,gardening,weather,snow,rain,wind,fire,water,ice,
    gold,silver,iron,oil,plastic,paper,glass,wood,salt,sugar,bread,cheese,rice,apples,beer,tea,
    cancer,headaches,diabetes,vitamins,the heart,blood,bones,muscles,eyes,ears,teeth,skin,hair,
    Einstein,Newton,Darwin,Mozart,Beethoven,Picasso,Napoleon,Caesar,Cleopatra,Gandhi,Lincoln,
    the president,the king of England,the pope,Linux,Windows,Java,Rust,JavaScript,databases,
    compilers,operating systems,cryptography,blockchain,the cloud,smartphones,cameras,lasers,atoms,
    electrons,energy,light,sound,heat,magnets,electricity,batteries,nuclear power,solar panels""".replace("\n", "").split(",")
)  # fmt: skip
SUBJECTS: Final = tuple(" ".join(topic.split()) for topic in TOPICS)
MONTHS: Final = tuple(
    """January February March April May June July August September October November
    December""".split()
)
WEEKDAYS: Final = tuple(
    "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
)
