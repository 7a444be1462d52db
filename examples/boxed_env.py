import agentrl


class SortWords(agentrl.ToolEnv):
    """Write a program in a box; hidden inputs are given to it in another box, where the policy has not been."""

    boxed = True  # each episode has a box of its own: self.box
    limits = agentrl.EpisodeLimits(turns=6)

    def __init__(self, **settings):
        super().__init__(tools=["write_file", "shell"], **settings)  # named tools work in it

    async def prompt(self, task):
        await self.box.write("words.txt", b"pear apple fig\n")
        return (
            "Write sort_words.py: it reads words from standard input and prints them sorted, one a line. Then say done."
        )

    def on_text(self, text):
        self.finish()

    async def grade(self):
        async with self.fresh_box(carry=["sort_words.py"]) as box:
            done = await box.exec(["python3", "sort_words.py"], stdin=b"kiwi date\nlime", timeout_s=5)
        return done.stdout.split() == [b"date", b"kiwi", b"lime"]
