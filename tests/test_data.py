"""The training text: where it comes from, with a web server of our own, and the batches that are made of it."""

import hashlib
import http.server
import threading

import numpy as np
import pytest
import torch

from lowprec_lab import data, devices
from lowprec_lab.data import DataError, Text, Vocabulary

VERSE = "To be, or not to be, that is the question.\n" * 60


class Server(http.server.BaseHTTPRequestHandler):
    """Serves the text as its class attributes say, and counts how often it was asked."""

    content, promised, asked = VERSE.encode(), None, 0

    def do_GET(self):
        type(self).asked += 1
        self.send_response(200)
        self.send_header("Content-Length", str(self.promised or len(self.content)))
        self.end_headers()
        self.wfile.write(self.content)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    handler = type("Fresh", (Server,), {})
    serving = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=serving.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr(data, "URL", f"http://127.0.0.1:{serving.server_port}/input.txt")
    monkeypatch.setattr(data, "SHA256", hashlib.sha256(VERSE.encode()).hexdigest())
    yield handler
    serving.shutdown()
    serving.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.delenv("LOWPREC_DATA", raising=False)
    folder = tmp_path / "cache"
    monkeypatch.setattr(data, "cache_folder", lambda: folder)
    return folder


@pytest.fixture
def no_network(monkeypatch):
    """An address on which nobody listens."""
    with http.server.HTTPServer(("127.0.0.1", 0), Server) as closed:
        port = closed.server_port
    monkeypatch.setattr(data, "URL", f"http://127.0.0.1:{port}/input.txt")


# where the text comes from


def test_it_is_fetched_once(server, cache):
    first, second = data.find_text(), data.find_text()
    assert (first.origin, second.origin) == ("download", "cache")
    assert first.characters == second.characters == VERSE
    assert server.asked == 1
    assert (cache / data.SHAKESPEARE).read_text() == VERSE
    assert data.URL in first.line
    assert str(cache) in second.line


def test_another_file_is_not_taken_for_it(server, cache):
    server.content = b"<html>Log in to the hotel's network</html>"
    text = data.find_text()
    assert text.origin == "embedded"
    assert "checksum is wrong" in text.line
    assert not list(cache.glob("*"))
    server.content = VERSE.encode()
    assert data.find_text().origin == "download"


def test_a_connection_that_breaks_leaves_nothing_behind(server, cache):
    server.promised = 10 * len(VERSE)
    assert data.find_text().origin == "embedded"
    assert not (cache / data.SHAKESPEARE).exists()
    server.promised = None
    assert data.find_text().origin == "download"


def test_a_damaged_cache_is_fetched_again(server, cache):
    data.find_text()
    (cache / data.SHAKESPEARE).write_text(VERSE[:100])
    assert data.find_text().origin == "download"
    assert data.find_text().characters == VERSE


def test_without_a_network_pythons_own_source(no_network, capsys):
    corpus = data.load_corpus()
    printed = capsys.readouterr().out
    assert "the source of Python's standard library" in printed
    assert "could not be fetched" in printed
    assert len(printed.splitlines()) == 1
    assert len(corpus.tokens) > 10**6
    assert len(corpus.vocabulary) <= 128
    assert "import " in corpus.vocabulary.decode(corpus.tokens[:20000])


def test_without_pooch_pythons_own_source(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pooch", None)
    text = data.find_text()
    assert text.origin == "embedded"
    assert "pooch is not installed" in text.line


def test_lowprec_data_is_a_file_or_a_folder(tmp_path, monkeypatch):
    own = tmp_path / "own.txt"
    own.write_text("My own text.")
    monkeypatch.setenv("LOWPREC_DATA", str(own))
    text = data.find_text()
    assert (text.characters, text.origin, text.name) == ("My own text.", "LOWPREC_DATA", "own.txt")
    assert str(own) in text.line
    assert data.local_text() == own
    (tmp_path / data.SHAKESPEARE).write_text(VERSE)
    monkeypatch.setenv("LOWPREC_DATA", str(tmp_path))
    assert data.find_text().characters == VERSE
    assert devices.cached_training_text() == str(tmp_path / data.SHAKESPEARE)


@pytest.mark.parametrize(("name", "words"), [("nowhere", "no such file"), (".", "there is no tinyshakespeare.txt")])
def test_lowprec_data_that_is_not_there(tmp_path, monkeypatch, name, words):
    monkeypatch.setenv("LOWPREC_DATA", str(tmp_path / name))
    with pytest.raises(DataError, match=words):
        data.find_text()
    assert data.local_text() is None


def test_lowprec_data_that_is_no_text(tmp_path, monkeypatch):
    (tmp_path / "picture.png").write_bytes(b"abc\xff\xfe")
    monkeypatch.setenv("LOWPREC_DATA", str(tmp_path / "picture.png"))
    with pytest.raises(DataError, match="no UTF-8 text: byte 3"):
        data.find_text()


def test_the_text_of_the_course_is_pinned():
    assert (data.SHA256[:8], data.SHA256[-8:]) == ("86c4e6aa", "2dc565ed")
    assert data.URL.startswith("https://")


# tokens


def test_tokens_are_characters_and_back():
    vocabulary = Vocabulary.of(VERSE)
    assert vocabulary.characters == "".join(sorted(set(VERSE)))
    tokens = vocabulary.encode(VERSE)
    assert tokens.dtype == np.uint8
    assert vocabulary.decode(tokens) == VERSE
    assert vocabulary.decode(torch.from_numpy(tokens[:5].astype(np.int64))) == VERSE[:5]


def test_more_than_256_characters_take_two_bytes():
    text = "".join(map(chr, range(32, 1000))) + "𝄞"
    vocabulary = Vocabulary.of(text)
    assert vocabulary.encode(text).dtype == np.uint16
    assert vocabulary.decode(vocabulary.encode(text[::-1])) == text[::-1]


def test_characters_that_the_vocabulary_lacks_are_named():
    with pytest.raises(DataError, match=r"lacks 'x', '€' \(first at character 3\)"):
        Vocabulary.of("abc").encode("abc€x")
    with pytest.raises(DataError, match="and others"):
        Vocabulary.of("abc").encode("uvwxyz")


def corpus(text=VERSE):
    return data.corpus_of(Text(text, "a verse", "LOWPREC_DATA", "Training text: a verse."))


def test_tokens_are_mapped_from_a_file_that_mends_itself(cache):
    first = corpus()
    assert isinstance(first.tokens, np.memmap)
    [file] = cache.glob("tokens-*.bin")
    assert file.stat().st_size == len(VERSE)
    file.write_bytes(b"damaged")
    assert corpus().vocabulary.decode(corpus().tokens) == VERSE
    assert not list(cache.glob(".*"))


def test_where_no_cache_can_be_written_tokens_stay_in_memory(cache, capsys):
    cache.write_text("a file where the folder should be")
    assert corpus().vocabulary.decode(corpus().tokens) == VERSE
    assert "kept in memory" in capsys.readouterr().err


# batches


def test_a_batch_is_pieces_of_the_split_and_what_follows_them():
    text = corpus()
    x, y = text.batch("train", data.step_generator(1, 2), batch=5, context=16)
    assert (x.shape, y.shape, x.dtype, y.dtype) == ((5, 16), (5, 16), torch.int64, torch.int64)
    train = text.vocabulary.decode(text.split("train"))
    for row in range(5):
        assert text.vocabulary.decode([*x[row], y[row, -1]]) in train
    assert torch.equal(x[:, 1:], y[:, :-1])


def test_a_step_has_its_own_batch_whatever_was_drawn_before():
    text = corpus()

    def batch(*key):
        return text.batch("train", data.step_generator(*key), 4, 16)[0]

    assert torch.equal(batch(1, 5), batch(1, 5))
    others = [batch(1, 6), batch(2, 5), batch(1, 5, 1)]
    assert not any(torch.equal(batch(1, 5), other) for other in others)


def test_splits_are_nine_tenths_and_the_rest():
    text = corpus()
    assert len(text.split("train")) == int(0.9 * len(VERSE))
    assert len(text.split("train")) + len(text.split("validation")) == len(VERSE)
    with pytest.raises(DataError, match="no split 'test'"):
        text.split("test")


def test_every_place_of_the_split_is_reached_and_none_beyond():
    text = corpus(VERSE[:100])
    x, y = text.batch("validation", data.step_generator(0, 0), batch=500, context=7)
    validation = text.split("validation").tolist()
    seen = {tuple(row) for row in torch.cat((x, y[:, -1:]), 1).tolist()}
    assert seen == {tuple(validation[start : start + 8]) for start in range(3)}


def test_even_batches_cover_the_split_from_end_to_end():
    text = corpus()
    batches = [text.even_batch("validation", i, 3, batch=4, context=8) for i in range(3)]
    validation = text.split("validation").tolist()
    assert batches[0][0][0].tolist() == validation[:8]
    assert batches[2][1][-1].tolist() == validation[-8:]
    assert all(torch.equal(x[:, 1:], y[:, :-1]) for x, y in batches)


@pytest.mark.parametrize("split", data.SPLITS)
def test_a_text_shorter_than_the_context(split):
    with pytest.raises(DataError, match=f"its {split} part has .* a context of 3000 needs 3001"):
        corpus().batch(split, data.step_generator(0, 0), context=3000)


def test_an_empty_text():
    with pytest.raises(DataError, match="is empty"):
        corpus("")
