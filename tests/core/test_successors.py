"""Which request follows which: frames induced from pairs, counted by state."""

from __future__ import annotations

import pytest

from hotbatch.core.speculation.frames import Beginning, Frame, induce
from hotbatch.core.speculation.successors import Habits, Successors, Turn

ANSWERS = ["the first answer, long enough", "a second one, of another length", "third: short"]


class Client:
    """Sends prompts and gets answers, at moments one second apart."""

    def __init__(self, habits: Habits | None = None) -> None:
        self.habits = habits or Habits()
        self.now = 0.0

    def ask(self, prompt: str, answer: str, was_cut: bool = False, manner: str = "m") -> Turn:
        self.now += 1.0
        turn = self.habits.arrive(prompt, manner, self.now).turn
        self.habits.end(turn, answer, was_cut, self.now)
        return turn

    def guesses(self, turn: Turn) -> list[str]:
        return [successor.prompt for successor in self.habits.successors(turn)]


def test_a_conversation_that_goes_on_in_a_fixed_way_is_foreseen_after_two_pairs() -> None:
    client = Client()
    prompt = "system: be careful\nuser: task 1\nassistant: "
    turns = []
    for answer in (*ANSWERS, "the fourth"):
        turns.append(client.ask(prompt, answer))
        prompt += answer + "\nuser: go on\nassistant: "
    assert client.guesses(turns[2]) == [turns[2].prompt + ANSWERS[2] + "\nuser: go on\nassistant: "]
    assert client.guesses(turns[3]) == [prompt]


@pytest.mark.parametrize("task", ["mow the lawn", "a much longer task than the ones before"])
def test_steps_of_a_pipeline_each_have_their_frame(task: str) -> None:
    """Each prompt holds the task, which differs from run to run, and the last answer only."""

    def run(client: Client, task: str, tell: bool = False) -> list[tuple[str, list[str]]]:
        told = []
        turn = client.ask(f"Task: {task}\nMake a plan.", f"plan for {task}")
        for step, verb in enumerate(("Criticise", "Improve", "Shorten")):
            prompt = f"Task: {task}\nText: {turn.answer}\n{verb} it."
            told.append((prompt, client.guesses(turn)))
            turn = client.ask(prompt, f"{verb} {step}: {task} is done")
        return told

    client = Client()
    run(client, "paint a door")
    run(client, "wash the car")
    for prompt, guessed in run(client, task):
        assert guessed[0] == prompt


def test_an_answer_that_the_client_strips_is_inserted_stripped() -> None:
    client = Client()
    for answer in ("  one answer\n", "\nanother answer", " and a third "):
        first = client.ask(f"Write about {answer.strip()}.", answer)
        expected = f"Translate: {answer.strip()}!"
        if answer == " and a third ":
            assert client.guesses(first) == [expected]
        client.ask(expected, "done with that")


def test_continuing_after_a_length_stop_is_told_from_going_on_after_an_end() -> None:
    client = Client()
    for number in range(3):
        cut = client.ask(f"Write essay {number}: ", "It begins so and", was_cut=True)
        client.ask(cut.prompt + cut.answer, " ends so.")
        whole = client.ask(f"Write essay {number} anew: ", "It begins and ends.")
        client.ask(f"Grade: {whole.answer} Thanks.", "A plus for it")
    cut = client.ask("Write essay 9: ", "Something quite different", was_cut=True)
    assert client.guesses(cut) == [cut.prompt + cut.answer]
    whole = client.ask("Write essay 10: ", "Something whole.")
    assert client.guesses(whole) == ["Grade: Something whole. Thanks."]


def test_one_pair_is_not_enough_and_chat_that_varies_never_is() -> None:
    client = Client()
    prompt = "user: hello there\nassistant: "
    for number in range(12):
        turn = client.ask(prompt, f"answer number {number * 37}")
        assert client.guesses(turn) == []
        prompt += f"{turn.answer}\nuser: question {number} is different\nassistant: "


def test_the_chance_is_the_share_of_turns_that_were_followed_so() -> None:
    client = Client()
    for number in range(40):
        turn = client.ask(f"Question {number}: why?", f"because of {number} things")
        if number % 2:
            client.ask(f"Summarise: {turn.answer}", "summary of it")
        else:
            client.ask(f"Other use {number} of {turn.answer} ({number})", "something else")
    turn = client.ask("Question 41: why?", "because of nothing")
    (successor,) = client.habits.successors(turn)
    assert successor.prompt == "Summarise: because of nothing"
    assert 0.35 < successor.chance < 0.65


def test_a_turn_that_nothing_follows_lowers_the_chance() -> None:
    client = Client()

    def chance() -> float:
        turn = client.habits.arrive("Q: last", "m", client.now).turn
        turn.end("the last answer", False)
        return client.habits.successors(turn)[0].chance

    for number in range(4):
        turn = client.ask(f"Q: {number}", f"answer {number} to it")
        client.ask(f"Next: {turn.answer}", "noted as well")
    before = chance()
    for number in range(20):
        client.ask(f"Q: {number}", f"answer {number} to it")
        client.now += 200.0  # it has been waited for long enough
    assert chance() < before / 2


def test_the_manner_of_asking_belongs_to_the_guess() -> None:
    client = Client()
    for number in range(3):
        turn = client.ask(f"Q: {number}", f"answer {number} to it", manner="greedy")
        client.ask(f"Next: {turn.answer}", "noted as well", manner="short")
    turn = client.ask("Q: 9", "answer 9 to it", manner="greedy")
    (successor,) = client.habits.successors(turn)
    assert successor.manner == "short"


def test_a_fan_out_keeps_both_branches() -> None:
    client = Client()
    for number in range(6):
        turn = client.ask(f"Q: {number}", f"answer {number} to it")
        client.ask(f"Left: {turn.answer}", "left answer")
        client.ask(f"Right: {turn.answer}", "right answer")
    turn = client.ask("Q: 9", "answer 9 to it")
    assert set(client.guesses(turn)) == {"Left: answer 9 to it", "Right: answer 9 to it"}
    assert all(successor.chance > 0.8 for successor in client.habits.successors(turn))


def test_nothing_grows_without_end() -> None:
    client = Client()
    for number in range(3000):
        turn = client.ask(f"{number} begins anew" * 3, f"answer {number}" * 4)
        client.ask(f"{number}" * 500 + turn.answer + f"{number}" * 500, "all is different")
    assert len(client.habits) <= 262_144 + 12 * 8192
    assert len(client.habits._rates) <= 256
    assert len(client.habits._turns) <= 64
    seen = {frame for rates in client.habits._rates.values() for frame in rates}
    assert client.habits._seen.keys() == seen


def test_owners_share_nothing_and_the_longest_unheard_of_is_forgotten() -> None:
    book = Successors()
    one = book.of("one")
    assert book.of("one") is one
    for number in range(200):
        book.of(number)
    assert len(book) == 128
    assert book.of("one") is not one


def test_an_answer_too_short_to_be_told_from_chance_makes_no_frame() -> None:
    assert induce("Is it so?", "yes", None, "yes it is, said yes", "m") == []


def test_frames_render_what_they_were_induced_from() -> None:
    prompt, answer, hole = "head: old answer tail", "new answer", 6
    following = "head: new answer another tail"
    frames = induce(prompt, answer, hole, following, "m")
    assert {frame.beginning for frame in frames} == {Beginning.NOTHING}
    long_head = "a head of some length: "
    prompt, following = long_head + "old answer tail", long_head + "new answer another tail"
    frames = induce(prompt, answer, len(long_head), following, "m")
    assert {frame.beginning for frame in frames} == set(Beginning)
    for frame in frames:
        rendered = frame.render(prompt, answer, len(long_head))
        assert rendered is not None
        assert rendered.prompt == following
        assert rendered.prompt[rendered.hole :].startswith(answer)


def test_a_frame_that_does_not_fit_renders_nothing() -> None:
    tail = Frame(Beginning.WITHOUT_TAIL, 50, "", "", True, "m")
    assert tail.render("short", "answer", None) is None
    up_to_hole = Frame(Beginning.UP_TO_HOLE, 0, "", "", True, "m")
    assert up_to_hole.render("prompt", "answer", None) is None


def test_turns_that_are_passed_over_count_as_not_followed_until_they_are() -> None:
    client = Client()
    for number in range(3):
        turn = client.ask(f"Q: {number}", f"answer {number} to it")
        client.ask(f"Next: {turn.answer}", "noted as well")
    late = client.ask("Q: 3", "answer 3 to it")
    (before,) = client.habits.successors(late)
    for number in range(20, 40):
        last = client.ask(f"Q: {number}", f"answer {number} to it")
    (passed,) = client.habits.successors(last)
    assert passed.chance < before.chance / 3
    client.ask(f"Next: {late.answer}", "noted at last")
    (followed,) = client.habits.successors(last)
    assert followed.chance > passed.chance
