"""The standard files of MNIST and CIFAR-10, as small files in the same formats; XOR."""

import contextlib
import functools
import gzip
import hashlib
import http.server
import io
import os
import pickle
import socket
import struct
import tarfile
import threading

import numpy as np
import pytest

from benchmarks.data import cifar10, mnist, pickled, standard, textures, xor
from benchmarks.data.files import Damage, DataError


NUM_TRAIN, NUM_TEST, NUM_PER_FILE = 12, 7, 11
RNG = np.random.default_rng(0)


def random_images(number, *image):
    labels = np.arange(number) % 10
    return RNG.integers(0, 256, (number, *image), np.uint8), labels.astype(np.uint8)


def md5s(folder):
    """Return the checksums of the zipped files; no others are known."""
    files = folder.glob("*.gz")
    return {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in files}


def assert_same(examples, images, labels):
    np.testing.assert_array_equal(examples[0], images)
    np.testing.assert_array_equal(examples[1], labels)
    assert (examples[0].dtype, examples[1].dtype) == (np.uint8, np.int32)


def assert_sentence(text, *parts):
    """Check for one sentence that contains all parts, and says what to do."""
    assert text.endswith(".")
    assert text.count(". ") == 0
    for part in (*parts, "download", "python -m benchmarks data"):
        assert part in text


#
# MNIST
#


TRAIN, TEST = random_images(NUM_TRAIN, 28, 28), random_images(NUM_TEST, 28, 28)
ARRAYS = {
    "train-images-idx3-ubyte": TRAIN[0],
    "train-labels-idx1-ubyte": TRAIN[1],
    "t10k-images-idx3-ubyte": TEST[0],
    "t10k-labels-idx1-ubyte": TEST[1],
}


def idx(array, magic=0x08):
    """Write the IDX format by hand."""
    header = bytes([0, 0, magic, array.ndim]) + struct.pack(
        f">{array.ndim}I", *array.shape
    )
    return header + array.tobytes()


def write_mnist(folder, zipped, changed=None):
    for name, array in ARRAYS.items():
        contents = idx(array)
        if changed and name in changed:
            contents = changed[name](contents)
        if zipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(contents))
        else:
            (folder / name).write_bytes(contents)


def load_mnist(folder):
    return mnist.load(folder, mnist.dataset(NUM_TRAIN, NUM_TEST, md5s(folder)))


@pytest.mark.parametrize("zipped", [True, False], ids=["gzipped", "plain"])
def test_mnist(tmp_path, zipped):
    write_mnist(tmp_path, zipped)
    train, test = load_mnist(tmp_path)
    assert_same(train, TRAIN[0][:, None], TRAIN[1])
    assert_same(test, TEST[0][:, None], TEST[1])


def test_mnist_with_an_unpacked_file(tmp_path):
    write_mnist(tmp_path, zipped=True)
    zipped = tmp_path / "t10k-labels-idx1-ubyte.gz"
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(
        gzip.decompress(zipped.read_bytes())
    )
    zipped.unlink()
    _, test = load_mnist(tmp_path)
    assert_same(test, TEST[0][:, None], TEST[1])


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


@pytest.mark.parametrize("zipped", [True, False], ids=["gzipped", "plain"])
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (IMAGES, lambda x: x[:-1], "holds 9,407 values, where there should be 9,408"),
        (IMAGES, lambda x: x + b"\0", "holds more values, where there should be 9,408"),
        (IMAGES, lambda x: x[:9], "ends within its header"),
        (IMAGES, lambda x: b"", "ends within its header"),
        (IMAGES, lambda _: idx(TRAIN[0], 0x0D), "'00 00 0d 03', not with the '00 00 08"),
        (LABELS, lambda _: idx(TRAIN[0]), "'00 00 08 03', not with the '00 00 08 01'"),
        (
            IMAGES,
            lambda _: idx(TRAIN[0][:, :, 1:]),
            "dimensions are 12 x 28 x 27, not 12 x 28 x 28",
        ),
        (LABELS, lambda _: idx(TRAIN[1][:5]), "its dimensions are 5, not 12"),
        (LABELS, lambda x: x[:-1] + b"\x0a", "has a label of 10, where they go from 0"),
    ],
)
def test_damaged_idx(tmp_path, zipped, name, change, message):
    write_mnist(tmp_path, zipped, {name: change})
    with pytest.raises(DataError) as caught:
        load_mnist(tmp_path)
    path = tmp_path / (f"{name}.gz" if zipped else name)
    url = f"{mnist.HOST}{name}.gz"
    assert_sentence(str(caught.value), f"'{path}' is damaged", message, url)


@pytest.mark.parametrize(
    "change", [lambda x: x[:200], lambda x: x[1:], lambda x: x[:-8] + 8 * b"\0"]
)
def test_a_damaged_gzip_file_with_the_right_checksum(tmp_path, change):
    write_mnist(tmp_path, zipped=True)
    path = tmp_path / f"{IMAGES}.gz"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match="it is not a whole gzip file"):
        load_mnist(tmp_path)


def test_a_wrong_checksum(tmp_path):
    write_mnist(tmp_path, zipped=True)
    with pytest.raises(DataError, match="MD5") as caught:
        mnist.load(tmp_path)
    expected = f"not {mnist.MD5[f'{IMAGES}.gz']}"
    assert_sentence(str(caught.value), str(tmp_path / f"{IMAGES}.gz"), expected)


def test_a_wrong_checksum_of_an_unpacked_file(tmp_path):
    write_mnist(tmp_path, zipped=False)
    with pytest.raises(DataError, match="MD5") as caught:
        mnist.load(tmp_path)
    expected = f"not {mnist.MD5[IMAGES]}"
    assert_sentence(str(caught.value), str(tmp_path / IMAGES), expected)


def test_absent_files(tmp_path):
    for folder in (tmp_path, tmp_path / "a folder"):
        with pytest.raises(DataError) as caught:
            mnist.load(folder)
        command = "python -m benchmarks data mnist --data-dir"
        url = f"{mnist.HOST}{IMAGES}.gz"
        assert_sentence(str(caught.value), f"no '{IMAGES}.gz'", url, command)
    assert f"{command} '{tmp_path}/a folder'" in str(caught.value)


def test_a_folder_where_a_file_should_be(tmp_path):
    (tmp_path / IMAGES).mkdir()
    with pytest.raises(DataError) as caught:
        mnist.load(tmp_path)
    assert_sentence(str(caught.value), "cannot be read (Is a directory)")


def test_the_table_of_checksums():
    assert len({*mnist.MD5.values(), *cifar10.MD5.values()}) == 22
    for source in standard.DATASETS.values():
        for part in source.parts:
            assert next(iter(part)) in source.md5


#
# CIFAR-10
#


BATCHES = [random_images(NUM_PER_FILE, 3072) for _ in range(6)]
NAMES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
BINARY, PYTHON = "cifar-10-batches-bin", "cifar-10-batches-py"


def binary(pixels, labels):
    return np.column_stack([labels, pixels]).tobytes()


def python(pixels, labels):
    """Pickle by Python 3 in a form that Python 2 can read."""
    batch = {
        b"batch_label": b"a batch",
        b"labels": labels.tolist(),
        b"data": pixels,
        b"filenames": [b"a.png"] * len(labels),
    }
    return pickle.dumps(batch, protocol=2)


def python2(pixels, labels):
    """Pickle as Python 2 wrote the real files: strings have one byte a character."""

    def text(x):
        return b"U" + bytes([len(x)]) + x

    data = pixels.tobytes()
    rows, columns = (b"M" + struct.pack("<H", n) for n in pixels.shape)
    return b"".join(
        [
            b"\x80\x02}q\x01(",
            text(b"labels"),
            b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e",
            text(b"data"),
            b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85",
            text(b"b") + b"\x87R(K\x01" + rows + columns + b"\x86cnumpy\ndtype\n",
            text(b"u1") + b"K\x00K\x01\x87R(K\x03" + text(b"|"),
            b"NNN" + 2 * b"J\xff\xff\xff\xff" + b"K\x00tb\x89",
            b"T" + struct.pack("<I", len(data)) + data + b"tbu.",
        ]
    )


def fortran(pixels, labels):
    return python(np.asfortranarray(pixels), labels)


def old_numpy(pixels, labels):
    return python(pixels, labels).replace(b"numpy._core", b"numpy.core")


def files_of(write, folder):
    suffix = ".bin" if folder == BINARY else ""
    pairs = zip(NAMES, BATCHES, strict=True)
    return {f"{name}{suffix}": write(*batch) for name, batch in pairs}


def write_cifar(data_dir, folder, files, archived):
    """`files`: contents, or how to change a tar archive's member."""
    if not archived:
        (data_dir / folder).mkdir()
        for name, contents in files.items():
            (data_dir / folder / name).write_bytes(contents)
        return data_dir / folder
    version = "binary" if folder == BINARY else "python"
    path = data_dir / f"cifar-10-{version}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        add(archive, tarfile.TarInfo(f"{folder}/readme.html"), b"Not read.")
        for name, contents in files.items():
            add(archive, tarfile.TarInfo(f"{folder}/{name}"), contents)
    return path


def add(archive, member, contents):
    member.size = len(contents)
    archive.addfile(member, io.BytesIO(contents))


def load_cifar(data_dir):
    return cifar10.load(data_dir, cifar10.dataset(NUM_PER_FILE, md5s(data_dir)))


ARCHIVED = pytest.mark.parametrize("archived", [True, False], ids=["archive", "folder"])
FORMATS = pytest.mark.parametrize(
    ("folder", "write"),
    [
        (BINARY, binary),
        (PYTHON, python2),
        (PYTHON, python),
        (PYTHON, fortran),
        (PYTHON, old_numpy),
    ],
)


@ARCHIVED
@FORMATS
def test_cifar10(tmp_path, folder, write, archived):
    write_cifar(tmp_path, folder, files_of(write, folder), archived)
    before = sorted(tmp_path.rglob("*"))
    train, test = load_cifar(tmp_path)
    pixels, labels = map(np.concatenate, zip(*BATCHES[:5], strict=True))
    assert_same(train, pixels.reshape(-1, 3, 32, 32), labels)
    assert_same(test, BATCHES[5][0].reshape(-1, 3, 32, 32), BATCHES[5][1])
    # Red, then green, then blue; each channel row by row.
    assert train[0][1, 2, 3, 4] == BATCHES[0][0][1, 2 * 1024 + 3 * 32 + 4]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(("folder", "write"), [(BINARY, binary), (PYTHON, python)])
def test_a_wrong_checksum_of_an_unpacked_batch(tmp_path, folder, write):
    path = write_cifar(tmp_path, folder, files_of(write, folder), archived=False)
    source = cifar10.dataset(NUM_PER_FILE)
    name = next(iter(files_of(write, folder)))
    with pytest.raises(DataError) as caught:
        cifar10.load(tmp_path, source)
    expected = f"the MD5 of '{name}' in it is", f"not {cifar10.MD5[name]}"
    assert_sentence(str(caught.value), f"'{path}' is damaged", *expected)
    known = {
        file.name: hashlib.md5(file.read_bytes()).hexdigest() for file in path.iterdir()
    }
    source = cifar10.dataset(NUM_PER_FILE, known)
    assert "by its checksum and contents" in source.verify(tmp_path)[0].sentence


def test_numpy_reads_the_pickle_that_is_written_here():
    pixels, labels = BATCHES[0]
    batch = pickle.loads(old_numpy(pixels, labels).replace(b"numpy.core", b"numpy._core"))
    np.testing.assert_array_equal(batch[b"data"], pixels)
    contents = python2(pixels, labels).replace(b"numpy.core", b"numpy._core")
    batch = pickle.loads(contents, encoding="bytes")
    np.testing.assert_array_equal(batch[b"data"], pixels)
    assert batch[b"labels"] == labels.tolist()


def changed(data_dir, folder, archived, change):
    """Return the error after a change of the third file."""
    files = files_of(binary if folder == BINARY else python, folder)
    name = list(files)[2]
    contents = change(files.pop(name))
    if contents is not None:
        files[name] = contents
    path = write_cifar(data_dir, folder, files, archived)
    with pytest.raises(DataError) as caught:
        load_cifar(data_dir)
    assert_sentence(str(caught.value), f"'{path}' is damaged", f"'{name}' in it")
    assert f"{cifar10.HOST}cifar-10-binary.tar.gz" in str(caught.value)
    return str(caught.value)


@ARCHIVED
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:-1], "has 33,802 bytes, not 33,803"),
        (lambda x: x + b"\0", "has 33,804 bytes, more than the 33,803 due"),
        (lambda x: b"\x0b" + x[1:], "has a label of 11, where they go from 0 to 9"),
        (lambda x: None, "there is no 'data_batch_3.bin' in it"),
    ],
)
def test_damaged_binary_batches(tmp_path, archived, change, message):
    assert message in changed(tmp_path, BINARY, archived, change)


def made(**other):
    """Make a pickled batch with some entries changed."""
    pixels, labels = BATCHES[0]
    batch = {"data": pixels, "labels": labels.tolist()} | other
    batch = {name.encode(): value for name, value in batch.items() if value is not None}
    return lambda _: pickle.dumps(batch, protocol=2)


NINES = [9] * (NUM_PER_FILE - 1)
WIDE = np.zeros((NUM_PER_FILE, 3072), np.uint16)


@ARCHIVED
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:-1], "is not a whole pickle"),
        (lambda x: x[: len(x) // 2], "is not a whole pickle"),
        (lambda x: b"", "is not a whole pickle"),
        (lambda x: b"no pickle", "is not a whole pickle"),
        (lambda x: None, "there is no 'data_batch_3' in it"),
        (lambda x: x + bytes(100_000), "more than the 78,848 due"),
        (lambda x: pickle.dumps([1], protocol=2), "is not the pickle of a dictionary"),
        (made(labels=None), "does not hold an array 'data' and a list 'labels'"),
        (made(data=[1, 2]), "does not hold an array 'data' and a list 'labels'"),
        (made(data=BATCHES[0][0][1:]), "has 'data' of 10 x 3072, not 11 x 3072"),
        (made(data=WIDE[:2]), "holds an array of other numbers than bytes"),
        (made(labels=NINES), "has 10 labels, not 11"),
        (made(labels=[*NINES, 10]), "has a label of 10, where they go from 0 to 9"),
        (made(labels=[*NINES, -1]), "has labels that are not whole numbers"),
        (made(labels=[*NINES, 2**64]), "has labels that are not whole numbers"),
        (made(labels=[*NINES, "9"]), "has labels that are not whole numbers"),
        (made(labels=[*NINES, 9.0]), "has a BINFLOAT, which pixels and labels do not"),
        (made(labels=[*NINES, 10**5000]), "has a LONG4, which pixels and labels do not"),
        (made(labels=[*NINES, [9]]), "has labels that are not whole numbers"),
    ],
)
def test_damaged_python_batches(tmp_path, archived, change, message):
    assert message in changed(tmp_path, PYTHON, archived, change)


# An array without values; the operations that follow set them.
ARRAY = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"


class Runs:
    """An object that calls a function when `pickle` reads it."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


@ARCHIVED
@pytest.mark.parametrize(
    ("function", "asked"),
    [(os.mkdir, "mkdir"), (os.system, "system"), (np.load, "load"), (eval, "eval")],
)
def test_a_hostile_pickle_is_refused_and_not_run(tmp_path, archived, function, asked):
    trace = tmp_path / "trace"
    argument = {
        os.system: f"touch '{trace}'",
        eval: f"__import__('os').mkdir({str(trace)!r})",
    }.get(function, str(trace))
    hostile = Runs(function, argument)
    pixels, labels = BATCHES[0]
    batch = {b"data": pixels, b"labels": labels.tolist(), b"more": hostile}
    contents = pickle.dumps(batch, protocol=2)
    message = changed(tmp_path, PYTHON, archived, lambda _: contents)
    assert "asks to run '" in message
    assert f".{asked}'" in message
    assert "was not run" in message
    assert not trace.exists()
    if function is os.mkdir:  # which it would have done
        pickle.loads(contents)
        assert trace.exists()


@pytest.mark.parametrize(
    "program",
    [
        # Admitted operations, used differently than NumPy uses them.
        b"c_codecs\nencode\nK\x05K\x06\x86R",
        b"c_codecs\nencode\n}U\x04evilK\x01sb",
        b"cnumpy\nndarray\nK\x05\x85R",
        b"cnumpy\nndarray\n)\x81K\x01b",
        b"}U\x04data" + ARRAY + b"K\x01bs",
        b"}U\x04data" + ARRAY + b"(K\x01J\xff\xff\xff\x7f\x85K\x01\x89U\x03abctbs",
        b"}K\x01K\x02s",
        b"}(K\x01u",
        b"}K\x01a",
        b"u",
        b"K\x01\x87",
        b"h\x05",
        # Refused: classes by number, persistent names, and making an object.
        b"\x82\x01",
        b"K\x05Q",
        b"(ios\nmkdir\n",
        b"(cos\nmkdir\no",
        b"U\x02osU\x05mkdir\x93",
        # False lengths and positions.
        b"}r\xff\xff\xff\xff",
        b"T\xff\xff\xff\x7fabc",
        b"X\xff\xff\xff\xffabc",
        b"\x8e\xff\xff\xff\xff\xff\x00\x00\x00abc",
        b"\x96\xff\xff\xff\xff\xff\x00\x00\x00abc",
    ],
)
def test_pickles_that_are_not_batches_are_refused(tmp_path, program):
    contents = b"\x80\x02" + program + b"."
    assert changed(tmp_path, PYTHON, False, lambda _: contents)


def test_bytes_at_random_are_refused_or_read():
    pixels, labels = (part[:3] for part in BATCHES[0])
    rng = np.random.default_rng(0)
    for whole in (python(pixels, labels), python2(pixels, labels)):
        # Skip the pixels, where any byte is valid.
        places = [*range(250), *range(len(whole) - 60, len(whole))]
        for _ in range(500):
            contents = bytearray(whole)
            for place in rng.choice(places, 2):
                contents[place] = rng.integers(256)
            with contextlib.suppress(Damage):
                pickled.load(bytes(contents))


def test_the_checksum_comes_before_the_contents(tmp_path, monkeypatch):
    write_cifar(tmp_path, PYTHON, files_of(python, PYTHON), archived=True)
    opened = []
    monkeypatch.setattr(tarfile, "open", lambda *arguments: opened.append(arguments))
    with pytest.raises(DataError, match="its MD5 is"):
        cifar10.load(tmp_path)
    assert not opened


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE])
def test_links_in_an_archive_are_not_followed(tmp_path, kind):
    files = files_of(binary, BINARY)
    with tarfile.open(tmp_path / "cifar-10-binary.tar.gz", "w:gz") as archive:
        target = f"{BINARY}/elsewhere.bin"
        add(archive, tarfile.TarInfo(target), files.pop("data_batch_1.bin"))
        for name, contents in files.items():
            add(archive, tarfile.TarInfo(f"{BINARY}/{name}"), contents)
        link = tarfile.TarInfo(f"{BINARY}/data_batch_1.bin")
        link.type, link.linkname = kind, target
        archive.addfile(link)
    with pytest.raises(DataError, match=r"there is no 'data_batch_1\.bin' in it"):
        load_cifar(tmp_path)


@pytest.mark.parametrize(
    "change", [lambda x: x[: len(x) // 2], lambda x: x[5:], lambda x: b""]
)
def test_a_damaged_archive_with_the_right_checksum(tmp_path, change):
    path = write_cifar(tmp_path, BINARY, files_of(binary, BINARY), archived=True)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match="it is not a whole archive"):
        load_cifar(tmp_path)


def test_preferred_version(tmp_path):
    """Archives are preferred, because they have a checksum, and the binary version,
    because it is not a pickle."""
    one = lambda label: binary(BATCHES[0][0], np.full(NUM_PER_FILE, label, np.uint8))
    write_cifar(tmp_path, BINARY, dict.fromkeys(files_of(binary, BINARY), one(3)), False)
    write_cifar(tmp_path, PYTHON, files_of(python, PYTHON), True)
    assert set(load_cifar(tmp_path)[0][1]) == set(range(10))
    write_cifar(tmp_path, BINARY, dict.fromkeys(files_of(binary, BINARY), one(5)), True)
    assert set(load_cifar(tmp_path)[0][1]) == {5}


def test_absent_cifar10(tmp_path):
    with pytest.raises(DataError) as caught:
        cifar10.load(tmp_path)
    names = ("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz", BINARY, PYTHON)
    assert_sentence(str(caught.value), *names, f"{cifar10.HOST}cifar-10-binary.tar.gz")


def test_a_file_where_a_folder_should_be(tmp_path):
    (tmp_path / BINARY).write_bytes(b"")
    with pytest.raises(DataError, match=r"there is no 'data_batch_1\.bin' in it"):
        cifar10.load(tmp_path)


#
# Verifying and downloading
#


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Return (folder, address) of a local server."""
    monkeypatch.setenv("no_proxy", "*")
    folder = tmp_path / "host"
    folder.mkdir()
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def use_mnist(monkeypatch, md5, address):
    source = mnist.dataset(NUM_TRAIN, NUM_TEST, md5, address)
    monkeypatch.setitem(standard.DATASETS, "mnist", source)
    return source


def test_downloading(tmp_path, host, monkeypatch):
    folder, address = host
    write_mnist(folder, zipped=True)
    source = use_mnist(monkeypatch, md5s(folder), address)
    data_dir, said = tmp_path / "made" / "data", []
    assert {f.condition for f in standard.verify("mnist", data_dir)} == {"absent"}
    assert standard.run("mnist", data_dir, said.append) == 0
    assert md5s(data_dir) == md5s(folder)
    assert len(list(data_dir.iterdir())) == 4
    for line in (
        f"Downloading {address}{IMAGES}.gz.",
        f"'{data_dir / IMAGES}.gz' is sou",
    ):
        assert any(sentence.startswith(line) for sentence in said)
    assert_same(mnist.load(data_dir, source)[0], TRAIN[0][:, None], TRAIN[1])
    # Existing files are not downloaded again.
    for path in folder.iterdir():
        path.unlink()
    said.clear()
    assert standard.run("mnist", data_dir, said.append) == 0
    assert len(said) == 4
    assert all(
        sentence.endswith("sound, by its checksum and contents.") for sentence in said
    )


def test_cifar10_is_downloaded_in_its_binary_version(tmp_path, host, monkeypatch):
    folder, address = host
    write_cifar(folder, BINARY, files_of(binary, BINARY), archived=True)
    source = cifar10.dataset(NUM_PER_FILE, md5s(folder), address)
    monkeypatch.setitem(standard.DATASETS, "cifar10", source)
    assert standard.run("cifar10", tmp_path / "data") == 0
    train, _ = cifar10.load(tmp_path / "data", source)
    assert train[0].shape == (5 * NUM_PER_FILE, 3, 32, 32)


def assert_not_downloaded(data_dir, *parts):
    said = []
    assert standard.run("mnist", data_dir, said.append) == 2
    assert said[-1].endswith(".")
    for part in (*parts, "try again, or download it elsewhere", str(data_dir)):
        assert part in said[-1]
    assert list(data_dir.iterdir()) == []


def test_downloading_something_else(tmp_path, host, monkeypatch):
    folder, address = host
    write_mnist(folder, zipped=True)
    use_mnist(monkeypatch, mnist.MD5, address)
    expected = mnist.MD5[f"{IMAGES}.gz"]
    assert_not_downloaded(tmp_path / "data", address, "its MD5 is", f"not {expected}")


def test_downloading_a_missing_file(tmp_path, host, monkeypatch):
    use_mnist(monkeypatch, mnist.MD5, host[1])
    assert_not_downloaded(tmp_path / "data", host[1], "(404 File not found)")


def test_downloading_without_a_network(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with socket.socket() as unused:
        # The port is bound, so nobody else uses it, but not listening, so it is closed.
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}/"
        use_mnist(monkeypatch, mnist.MD5, address)
        assert_not_downloaded(tmp_path, address, "(Connection refused)")


def test_downloading_to_a_file(tmp_path, host, monkeypatch):
    use_mnist(monkeypatch, mnist.MD5, host[1])
    data_dir = tmp_path / "file"
    data_dir.write_text("")
    with pytest.raises(DataError, match=r"could not be downloaded to .*File exists"):
        standard.download("mnist", data_dir)


def test_a_damaged_file_is_reported_and_kept(tmp_path, host, monkeypatch, capsys):
    folder, address = host
    write_mnist(folder, zipped=True)
    use_mnist(monkeypatch, md5s(folder), address)
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    (data_dir / IMAGES).write_bytes(idx(TRAIN[0]))
    (data_dir / f"{LABELS}.gz").write_bytes(b"damaged")
    findings = standard.verify("mnist", data_dir)
    assert [f.path.name for f in findings] == [
        IMAGES,
        f"{LABELS}.gz",
        "t10k-images-idx3-ubyte.gz",
        "t10k-labels-idx1-ubyte.gz",
    ]
    conditions = ["sound", "damaged", "absent", "absent"]
    assert [f.condition for f in findings] == conditions
    assert findings[0].sentence == f"'{data_dir / IMAGES}' is sound, by its contents."
    assert_sentence(findings[1].sentence, "is damaged: its MD5 is", "delete it")
    assert standard.run("mnist", data_dir) == 2
    assert (data_dir / f"{LABELS}.gz").read_bytes() == b"damaged"
    assert "is damaged" in capsys.readouterr().out
    (data_dir / f"{LABELS}.gz").unlink()
    assert standard.run("mnist", data_dir) == 0


def test_an_unknown_data_set(tmp_path, capsys):
    assert standard.run("imagenet", tmp_path) == 2
    said = capsys.readouterr().out
    assert said == (
        "There is no data set 'imagenet' to look for; there are mnist and cifar10.\n"
    )


#
# Scaling
#


def test_scaled():
    x = standard.scaled(np.array([0, 51, 255], np.uint8).reshape(1, 3, 1, 1))
    assert x.dtype == np.float32
    np.testing.assert_allclose(np.ravel(x), [0, 0.2, 1], rtol=1e-6)


def test_standardised():
    images, test = (RNG.integers(0, 200, (n, 3, 8, 8), np.uint8) for n in (50, 20))
    images[:, 1] //= 4
    x, test_x = standard.standardised(images, test)
    assert x.dtype == test_x.dtype == np.float32
    np.testing.assert_allclose(x.mean(axis=(0, 2, 3)), 0, atol=1e-6)
    np.testing.assert_allclose(x.std(axis=(0, 2, 3)), 1, rtol=1e-6)
    mean = (images / 255).mean(axis=(0, 2, 3), keepdims=True)
    deviation = (images / 255).std(axis=(0, 2, 3), keepdims=True)
    expected = (test / 255 - mean) / deviation
    np.testing.assert_allclose(test_x, expected, rtol=1e-5, atol=1e-6)


#
# XOR
#


def test_xor():
    x, y = xor.examples(100_000, seed=0)
    assert (x.shape, y.shape) == ((100_000, 2), (100_000, 1))
    np.testing.assert_array_equal(y[:, 0], x[:, 0] * x[:, 1])
    # Var z + Var e; E y = 0, E y^2 = (1 + 0.1)^2.
    np.testing.assert_allclose(np.cov(x.T), 1.1 * np.eye(2), atol=0.02)
    np.testing.assert_allclose(np.mean(y**2), 1.1**2, rtol=0.02)
    assert abs(np.mean(y)) < 0.02
    # A quarter of the points lies around each corner, with normal noise.
    for corner in ([1, 1], [1, -1], [-1, 1], [-1, -1]):
        share = np.mean(np.all(np.sign(x) == corner, axis=1))
        assert abs(share - 0.25) < 0.01
    noise = (np.abs(x) - 1).ravel()
    np.testing.assert_allclose(np.std(noise), np.sqrt(0.1), rtol=0.02)


def test_xor_of_a_seed():
    np.testing.assert_array_equal(*(xor.examples(9, seed=3)[0] for _ in range(2)))
    assert not np.array_equal(xor.examples(9, 3)[0], xor.examples(9, 4)[0])


@pytest.mark.slow
def test_textures_tell_their_class_by_their_spectrum_alone():
    (images, labels), validation, (test, test_labels) = textures.draw(500, 0)
    assert images.shape == (500, 3, 32, 32)
    assert len(validation[1]) == 500
    np.testing.assert_allclose(images.mean(axis=(1, 2, 3)), 0, atol=1e-12)
    np.testing.assert_allclose(images.std(axis=(1, 2, 3)), 1)
    assert np.bincount(labels).tolist() == 10 * [50]

    def right(of, test=test):
        """The share right of the class with the nearest mean."""
        means = np.stack([of(images[labels == c]).mean(axis=0) for c in range(10)])
        away = ((of(test)[:, None] - means) ** 2).sum(axis=2)
        return np.mean(away.argmin(axis=1) == test_labels)

    def spectrum(images):
        return np.log(np.abs(np.fft.fft2(images)).mean(axis=1)).reshape(len(images), -1)

    # The pixels of one class vary alike, which tells a little.
    assert right(lambda images: images.reshape(len(images), -1)) < 0.4
    assert right(spectrum) > 0.6
    # A flip leaves the class what it is.
    assert right(spectrum, test[..., ::-1]) > 0.6


def test_textures_depend_on_the_seed_and_the_test_images_on_nothing_else(monkeypatch):
    monkeypatch.setattr(textures, "NUM_TEST", 30)
    monkeypatch.setattr(textures, "NUM_VALIDATION", 20)
    draw = textures.draw.__wrapped__  # keeps nothing
    train, validation, test = draw(20, 3)
    again = draw(20, 3)
    np.testing.assert_array_equal(train[0], again[0][0])
    other = draw(20, 4)
    assert np.abs(train[0] - other[0][0]).max() > 1
    more = draw(30, 3)
    np.testing.assert_array_equal(more[2][0], test[0])
    np.testing.assert_array_equal(more[1][0], validation[0])
