"""The cache on disk: what it gives back is what was put, and nothing that is torn, another's, or over the limit."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import torch

from examples.dflash import feature_cache
from examples.dflash.config import InputError
from examples.dflash.feature_cache import (
    DiskCache,
    LayeredCache,
    MemoryCache,
    open_disk_cache,
    target_identity,
)
from examples.dflash.feature_cache import feature_cache as make_cache
from examples.dflash.features import FeatureSource
from examples.dflash.train import train_on
from tests.helpers import run_threads

from .models import packed_row, tiny_config, tiny_target
from .test_train import CPU, Topology, configuration, documents

IDS = (1, 3)
LIMIT = 2**20


def entry(seed=0, length=5, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {
        "features": torch.randn(length, 8, generator=generator).to(dtype),
        "target_tokens": torch.randint(0, 99, (length,), generator=generator),
    }


def tokens(seed=0, length=5):
    return torch.randint(0, 99, (length,), generator=torch.Generator().manual_seed(seed))


def same(ours, expected):
    return set(ours) == set(expected) and all(
        ours[name].dtype == expected[name].dtype and torch.equal(ours[name], expected[name]) for name in expected
    )


def files(directory):
    return [path for path in directory.glob("??/*") if path.is_file()]


def total(directory):
    return sum(path.stat().st_size for path in files(directory))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_disk_cache_gives_back_every_tensor_bit_for_bit_in_a_later_run(tmp_path, dtype):
    DiskCache(tmp_path, LIMIT, "a").put(tokens(), entry(dtype=dtype))
    later = DiskCache(tmp_path, LIMIT, "a")
    assert same(later.get(tokens()), entry(dtype=dtype))
    assert later.get(tokens(1)) is None
    assert later.num_bytes == total(tmp_path) > 0


def test_disk_cache_does_not_give_another_targets_entries(tmp_path):
    DiskCache(tmp_path, LIMIT, "a").put(tokens(), entry())
    assert DiskCache(tmp_path, LIMIT, "b").get(tokens()) is None


def test_identity_is_the_targets_own(tmp_path):
    target = tiny_target()
    identity = target_identity(target, IDS)
    assert target_identity(tiny_target(), IDS) == identity
    assert target_identity(tiny_target(seed=1), IDS) != identity
    assert target_identity(tiny_target(dtype=torch.bfloat16), IDS) != identity
    assert target_identity(target, (1, 4)) != identity
    target.config.rope_parameters["rope_theta"] = 7000.0
    assert target_identity(target, IDS) != identity
    changed = tiny_target()
    with torch.no_grad():
        weight = changed.decoder.layers[2].mlp.up_proj.weight
        weight[3, 4] = torch.nextafter(weight[3, 4], torch.tensor(9.0))  # a single bit
    assert target_identity(changed, IDS) != identity


@pytest.mark.parametrize("harm", ["truncated", "empty", "flipped", "zeroed", "another format"])
def test_damaged_file_is_removed_and_written_anew(tmp_path, harm):
    cache = DiskCache(tmp_path, LIMIT, "a")
    cache.put(tokens(), entry())
    (path,) = files(tmp_path)
    content = path.read_bytes()
    path.write_bytes(
        {
            "truncated": content[: len(content) // 2],
            "empty": b"",
            "flipped": content[:-20] + bytes([content[-20] ^ 1]) + content[-19:],
            "zeroed": content[:60] + bytes(len(content) - 60),
            "another format": b"nonsense" + feature_cache.zlib.crc32(b"nonsense").to_bytes(4, "little"),
        }[harm]
    )
    assert cache.get(tokens()) is None
    assert files(tmp_path) == []
    cache.put(tokens(), entry())
    assert same(cache.get(tokens()), entry())


def test_files_never_exceed_the_limit_over_threads_and_caches(tmp_path):
    size = len(feature_cache._encode(entry()))
    limit = 5 * size + size // 2
    caches = [DiskCache(tmp_path, limit, "a") for _ in range(2)]

    def body(index):
        for seed in range(8):
            caches[index % 2].put(tokens(10 * index + seed), entry(seed))

    run_threads(4, body)
    assert len(files(tmp_path)) == 5
    assert caches[0].num_bytes == total(tmp_path) == 5 * size


def test_entry_that_two_threads_put_at_once_is_counted_once(tmp_path):
    cache = DiskCache(tmp_path, LIMIT, "a")
    run_threads(4, lambda index: [cache.put(tokens(seed), entry(seed)) for seed in range(6)])
    assert len(files(tmp_path)) == 6
    assert cache.num_bytes == total(tmp_path)
    assert all(same(cache.get(tokens(seed)), entry(seed)) for seed in range(6))


WRITER = """
import sys, torch
from pathlib import Path
from examples.dflash.feature_cache import DiskCache
from tests.dflash.test_feature_cache import entry, tokens
cache = DiskCache(Path(sys.argv[1]), int(sys.argv[2]), "a")
first, count = int(sys.argv[3]), int(sys.argv[4])
print("ready", flush=True)
for seed in range(first, first + count):
    cache.put(tokens(seed, 400), entry(seed, 400))
"""


def writer(directory, limit, first, count):
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(directory), str(limit), str(first), str(count)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_processes_share_a_directory_its_limit_and_survive_a_kill(tmp_path):
    size = len(feature_cache._encode(entry(0, 400)))
    limit = 30 * size
    processes = [writer(tmp_path, limit, 0, 20), writer(tmp_path, limit, 10, 10**6)]
    assert all(process.stdout.readline() == "ready\n" for process in processes)
    processes[0].wait(timeout=60)
    deadline = time.monotonic() + 60
    while len(files(tmp_path)) < 20 and time.monotonic() < deadline:
        time.sleep(0.01)
    processes[1].send_signal(signal.SIGKILL)
    processes[1].wait(timeout=60)
    assert total(tmp_path) <= limit
    cache = DiskCache(tmp_path, limit, "a")
    found = [seed for seed in range(40) if cache.get(tokens(seed, 400)) is not None]
    assert len(found) >= 20
    assert all(same(cache.get(tokens(seed, 400)), entry(seed, 400)) for seed in found)
    assert cache.num_bytes == total(tmp_path)


def test_what_a_killed_process_had_begun_counts_until_it_is_old_and_then_goes(tmp_path):
    cache = DiskCache(tmp_path, LIMIT, "a")
    path = cache._path(tokens())
    left = path.with_name(f".{path.name}.1.1.tmp")
    assert cache._reserve(left, 1000)
    assert DiskCache(tmp_path, LIMIT, "a").num_bytes == 1000
    os.utime(left, (0, 0))
    assert DiskCache(tmp_path, LIMIT, "a").num_bytes == 0
    assert not left.exists()


def test_lost_count_is_made_anew(tmp_path):
    cache = DiskCache(tmp_path, LIMIT, "a")
    cache.put(tokens(), entry())
    (tmp_path / "usage").write_text("")
    assert cache.num_bytes == total(tmp_path)


def test_full_disk_ends_writing_with_one_message_and_reading_goes_on(tmp_path, monkeypatch):
    said = []
    cache = DiskCache(tmp_path, LIMIT, "a", said.append)
    cache.put(tokens(), entry())
    opened = pathlib.Path.open

    class Full:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *exc):
            self.file.close()

        def write(self, content):
            self.file.write(content[:10])
            raise OSError(errno.ENOSPC, "No space left on device")

    def open_(path, mode="r", *args, **kwargs):
        file = opened(path, mode, *args, **kwargs)
        return Full(file) if mode == "r+b" else file

    monkeypatch.setattr(pathlib.Path, "open", open_)
    for seed in (1, 2):
        cache.put(tokens(seed), entry(seed))
    assert not cache.writing
    assert len(said) == 1 and "No space left" in said[0]
    assert len(files(tmp_path)) == 1 and cache.num_bytes == total(tmp_path)
    assert same(cache.get(tokens()), entry())


def test_directory_that_cannot_be_written_is_an_input_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="--cache-dir"):
        DiskCache(tmp_path / "file" / "cache", LIMIT, "a")


def test_memory_in_front_of_the_disk_spares_reading_it_again(tmp_path, monkeypatch):
    disk = DiskCache(tmp_path, LIMIT, "a")
    LayeredCache(MemoryCache(LIMIT), disk).put(tokens(), entry())
    cache = LayeredCache(MemoryCache(LIMIT), disk)
    reads = []
    get = disk.get
    monkeypatch.setattr(disk, "get", lambda key: reads.append(1) or get(key))
    assert same(cache.get(tokens()), entry()) and same(cache.get(tokens()), entry())
    assert len(reads) == 1
    small = LayeredCache(MemoryCache(0), disk)
    small.put(tokens(1), entry(1))
    assert small.memory.num_bytes == 0
    assert same(small.get(tokens(1)), entry(1))


def test_options_choose_the_cache(tmp_path):
    def made(**changes):
        config = configuration(tmp_path, **changes)
        return make_cache(config, open_disk_cache(config, tiny_target(), IDS))

    assert made() is None
    assert isinstance(made(cache_features=1.0), MemoryCache)
    assert isinstance(made(cache_dir=tmp_path / "cache"), DiskCache)
    assert isinstance(made(cache_dir=tmp_path / "cache", cache_features=1.0), LayeredCache)
    assert made(cache_dir=tmp_path / "other", cache_disk=0.0) is None


def test_source_reads_features_of_an_earlier_run_and_computes_nothing(tmp_path):
    batch = packed_row((11, 7), 40, 4, 4)
    config = configuration(tmp_path, cache_dir=tmp_path / "cache")
    former = make_cache(config, open_disk_cache(config, tiny_target(), IDS))
    first = FeatureSource(tiny_target(), IDS, former)(batch)["features"]
    later = tiny_target()
    source = FeatureSource(later, IDS, make_cache(config, open_disk_cache(config, later, IDS)))
    later.features = None  # would fail if called
    assert torch.equal(source(batch)["features"], first)
    other = tiny_target(seed=1)
    source = FeatureSource(other, IDS, make_cache(config, open_disk_cache(config, other, IDS)))
    expected = FeatureSource(other, IDS)(batch)["features"]
    torch.testing.assert_close(source(batch)["features"], expected, rtol=1e-5, atol=1e-5)


def test_train_with_the_cache_gives_the_losses_of_training_without(tmp_path):
    def losses(name, **changes):
        config = configuration(tmp_path / name, max_steps=6, **changes)
        assert train_on(documents(6), {CPU: tiny_target()}, tiny_config(), config, Topology((CPU, CPU), (CPU,))) == 0
        lines = (config.out / "metrics.jsonl").read_text().splitlines()
        return [record["loss"] for record in map(json.loads, lines) if "event" not in record]

    plain = losses("plain")
    cached = dict(cache_dir=tmp_path / "cache")
    assert losses("first", **cached) == pytest.approx(plain, rel=1e-5)
    assert len(files(tmp_path / "cache")) == 6
    assert losses("second", **cached) == pytest.approx(plain, rel=1e-5)
