"""Words for keys and lists: an adjective and a noun, joined by a hyphen, as in `brave-otter`.

No adjective ends with another one and no noun begins with another one. So no such word stands within another one, and whether a
text holds a word can be told by looking for its characters.
"""

ADJECTIVES = """
    able active agile alert amber ample ancient arctic ardent arid artful atomic august autumn average awake azure balanced
    bare bashful basic beige beloved bitter black blank blazing blissful blond blue blunt bold bouncy boundless brave breezy
    brief bright brisk broad bronze brown bubbly busy calm candid careful caring casual cautious central certain charming
    cheap cheerful chief chubby civic classic clear clever close cloudy clumsy coastal cold colossal common compact complete
    cool copper coral cordial cosmic costly cozy crafty crazy creamy crimson crisp crooked crowded crucial crystal cubic
    curious curly current cyan daily damp daring dark dazzling dear decent deep deluxe dense digital diligent dim direct
    distant dizzy double dramatic dreamy driven drowsy dry dull dusty eager early earnest earthy easy ebony edible elastic
    elder elegant eminent empty endless entire epic equal eternal even exact exotic expert extra fabled faded faint fair
    faithful famous fancy fast fearless feathery festive fierce fiery final fine firm fixed flat fleet flexible floral fluffy
    fluid flying foggy folded fond formal frank free frequent fresh friendly frosty frozen frugal full funny furry future
    fuzzy gallant generous gentle genuine giant giddy gifted glad gleaming global glossy golden good graceful grand grassy
    grateful gray great green groovy guarded gusty handsome handy happy hardy harmless hasty hazel hazy healthy hearty heavy
    helpful heroic hidden high hilly hollow honest hopeful hot huge humble humid hungry husky icy ideal idle immense indigo
    inland inner instant intact ivory jade jagged jolly joyful joyous jubilant jumbo just keen khaki kind knotty known large
    lasting late latent lavender lavish lazy leafy lean legal lemon level light likely lilac limber lime limp linear liquid
    little lively local lofty lone long loose loud lovely lowly loyal lucid lucky lunar lush magenta magic main majestic major
    maple marble marine maroon massive mature mauve mellow melodic merry metallic mighty mild milky mindful minor minty misty
    mobile modern modest moist mossy muddy muffled mute mystic naive narrow native natural naval navy neat neutral new nimble
    noble nocturnal noisy normal northern noted novel numb nutty oaken ochre odd olive open optimal orange orderly organic
    ornate outer oval painted pale paper pastel patient peaceful perky petite pink placid plain playful pleasant plum plump
    poetic polar polished polite popular posh precise pretty primal prime private prompt proper proud prudent public punctual
    pure purple quaint quick quiet quirky radiant rapid rare ready real refined regal regular relaxed remote restful rich
    rigid ripe robust rocky rosy rotund rough round royal ruby rugged rural russet rustic rusty salty sandy sane satin scarlet
    scenic secret sedate serene serious shady shaggy sharp sheer shiny short shy silent silky silly silver simple sincere
    single skilled sleek sleepy slender slim slow small smart smooth snowy snug sober social soft solar solemn solid somber
    sour southern spare spiral splendid spotted spry square stark starry static steady steep sterling stern still stoic stormy
    stout straight striped strong sturdy subtle sudden sugary sunny super supple sure sweet swift tall tame tan tangy tart
    tasty teal tender tepid thankful thick thin thrifty tidal tidy timely tiny tired tranquil trim tropical turquoise twin
    umber unique upbeat upper urban useful usual vague valiant valid vast velvet verdant vibrant vintage violet vital vivid
    vocal wandering warm watchful wavy wealthy wheaten white whole wide wild willing windy winged wintry wise witty wooden
    woolly worthy yellow young youthful zany zealous zesty
""".split()

NOUNS = """
    acorn actor airport album alley almond anchor angle ankle answer antler apple apron arbor arch arena armor arrow artist
    aspen atlas attic author avenue award badge bagel bakery balcony ball bamboo banana banjo banner barley barn barrel basin
    basket battery bay beach beacon bead beam bear beaver beetle bell belt bench berry bicycle bird biscuit blanket blossom
    board boat bolt book boot border bottle boulder bowl box bracelet branch bread breeze brick bridge broom brush bubble
    bucket bugle building bundle bus butter button cabin cable cactus cake camel camera campus canal candle canoe canvas
    canyon captain caravan card cargo carpet carrot cart cashew castle cavern cedar cello chain chair chalk channel chapel
    chapter cheese cherry chest chimney chisel church cider cinema circle city clay cliff clinic clock cloth cloud clover
    coach coat cobalt coconut coffee coin collar college comet compass cookie corner cottage cotton cougar country cousin
    cradle crane crater crayon creek cricket crown cube cup curtain cushion cymbal dagger dairy daisy dancer deer desert desk
    diamond dice dinner doctor dolphin domino donkey door dragon drawer dress drum duck dune eagle easel echo elbow elephant
    elevator elm engine envelope estate falcon family farmer feather fence fern ferry fiddle field fig finger fjord flag flame
    flask flute forest fork fossil fountain fox frame frigate frog fruit funnel furnace galaxy gallery garden garlic gate
    gecko geyser ginger giraffe glacier glass glove goat goblet goose gorge granite grape grove guitar gull hammer hammock
    harbor harp hat hawk hedge helmet heron highway hill hinge hive honey hook horizon horse hotel house husk iceberg iguana
    inkwell insect island ivy jacket jaguar jar jasmine jelly jewel journal judge jungle juniper kayak kettle key kingdom
    kitchen kite kitten koala ladder lagoon lake lamp lantern laptop larch lark laser lattice laurel lawn leaf ledger lentil
    leopard letter library lighthouse lily lion lizard llama lobster locket locomotive lodge loom lotus lynx machine magnet
    mango mantle map market marsh mask meadow medal melon meteor mill mirror mitten moat monkey moon moose moss motor mountain
    mouse mural museum mushroom napkin nebula necklace needle nest net newt nickel notebook nozzle nugget oasis oatmeal ocean
    octopus office onion opal opera orbit orchard orchid organ osprey otter oven owl oyster packet paddle padlock pagoda
    palace palm panda panther parade park parrot parsley pasture path patio peach peanut pebble pelican pencil penguin pepper
    petal piano pickle picture pier pigeon pillow pilot pine pipe pirate planet plaza plow pocket poem pond pony poplar porch
    portrait potato pottery prairie prism pudding puffin pulley pumpkin puppet puzzle pyramid quarry quartz quill quilt rabbit
    raccoon radar radio raft railway rain ranch raven reef ribbon rice river road robin robot rocket roof rooster rope rose
    rudder sailor salad salmon sandal sapphire saucer scarf school scooter scroll seal season shadow shark shed sheep shelf
    shell shield ship shoe shovel shrimp signal sister sketch skyline sled slipper snail socket sofa soup sparrow spear spider
    spoon spring squirrel stadium stage stamp station statue stone stork stove stream street summit sunset swallow swan sword
    syrup table tailor talon tavern teacher temple tent theater thimble thistle throne thunder ticket tiger timber toad tomato
    torch tortoise towel tower tractor trail train tree trout truck trumpet tulip tundra tunnel turban turnip turtle unicorn
    valley vase vault vessel viaduct village vine violin volcano voyage wagon walnut walrus water weasel whale wheat wheel
    whisker whistle widget willow window wolf wombat workshop wreath yacht yarn zebra zeppelin
""".split()

NUM_WORDS = len(ADJECTIVES) * len(NOUNS)


def word(number: int) -> str:
    """The word of this number, 0 to NUM_WORDS - 1; different numbers have different words."""
    adjective, noun = divmod(number, len(NOUNS))
    return f"{ADJECTIVES[adjective]}-{NOUNS[noun]}"
