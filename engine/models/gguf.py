"""A GGUF file: its metadata read as a family's config, its tensors named canonically, blocks kept as they are stored."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from gguf.constants import GGUFEndian, GGUFValueType
from gguf.gguf_reader import GGUFReader
from gguf.quants import _type_traits

from engine.kernels.ops import Quant, Weight
from engine.lean import torch
from engine.mapped import MappedFile, map_file
from engine.models import gguf_latent
from engine.models.config import Config
from engine.models.errors import ModelError, unreadable
from engine.models.families import build_spec
from engine.models.names import Piece, ba_rows, kv_b_rows, place, qkvz_rows, split, unpaired_rows, untiled_rows
from engine.models.spec import AttentionSpec, DeltaNetSpec, ModelSpec
from engine.tensors import Library

log = logging.getLogger(__name__)

PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # a dtype by its name
NAMES = {
    "token_embd.weight": "embed",
    "output_norm.weight": "final_norm",
    "output.weight": "head",
    "blk.{L}.attn_norm.weight": "mixer_norm",
    "blk.{L}.ffn_norm.weight": "ffn_norm",
    "blk.{L}.attn_q.weight": "attn.q",
    "blk.{L}.attn_k.weight": "attn.k",
    "blk.{L}.attn_v.weight": "attn.v",
    "blk.{L}.attn_output.weight": "attn.o",
    "blk.{L}.attn_q.bias": "attn.q_bias",
    "blk.{L}.attn_k.bias": "attn.k_bias",
    "blk.{L}.attn_v.bias": "attn.v_bias",
    "blk.{L}.attn_output.bias": "attn.o_bias",
    "blk.{L}.attn_q_norm.weight": "attn.q_norm",
    "blk.{L}.attn_k_norm.weight": "attn.k_norm",
    "blk.{L}.ffn_gate.weight": "mlp.gate",
    "blk.{L}.ffn_up.weight": "mlp.up",
    "blk.{L}.ffn_down.weight": "mlp.down",
    "blk.{L}.ffn_gate_inp.weight": "moe.router",
    "blk.{L}.ffn_gate_exps.weight": "gate#moe.gate_up",
    "blk.{L}.ffn_up_exps.weight": "up#moe.gate_up",
    "blk.{L}.ffn_gate_up_exps.weight": "moe.gate_up",
    "blk.{L}.ffn_down_exps.weight": "moe.down",
    "blk.{L}.ffn_gate_shexp.weight": "moe.shared.gate",
    "blk.{L}.ffn_up_shexp.weight": "moe.shared.up",
    "blk.{L}.ffn_down_shexp.weight": "moe.shared.down",
    "blk.{L}.ffn_gate_inp_shexp.weight": "moe.shared.switch",
    "blk.{L}.post_attention_norm.weight": "ffn_norm",
    "blk.{L}.attn_qkv.weight": "delta.qkv",
    "blk.{L}.attn_gate.weight": "delta.z",
    "blk.{L}.ssm_beta.weight": "delta.b",
    "blk.{L}.ssm_alpha.weight": "delta.a",
    "blk.{L}.ssm_conv1d.weight": "delta.conv",
    "blk.{L}.ssm_dt.bias": "delta.dt_bias",
    "blk.{L}.ssm_a": "delta.a_log",
    "blk.{L}.ssm_norm.weight": "delta.norm",
    "blk.{L}.ssm_out.weight": "delta.o",
}
SPLITS = {
    "blk.{L}.ssm_in.weight": qkvz_rows,
    "blk.{L}.ssm_ba.weight": ba_rows,
    "blk.{L}.attn_kv_b.weight": kv_b_rows,
}
LONGEST_ARRAY = 10_000  # elements of a metadata array that is read: one value a layer at most, see families.common.MOST_LAYERS
FREQUENCY_DIVISORS = "rope_freqs.weight"  # Llama 3.1's scaling as one divisor a frequency; goes into the spec

COMMON_KEYS = {  # GGUF key without the architecture -> the config.json key of the families
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "full_attention_interval": "full_attention_interval",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}


@dataclass(frozen=True)
class Architecture:
    """How one GGUF architecture differs from its family's Hugging Face checkpoint."""

    model_type: str
    constants: dict[str, object]  # config keys the architecture implies and the file does not carry
    paired_rope: bool = False  # q and k rows were reordered so that the two halves of a rotation are neighbours
    latent: bool = False  # latent attention: names and keys of `gguf_latent`
    tiled_values: bool = False  # DeltaNet's value heads are ordered (repeat, key head) instead of (key head, repeat)


ARCHITECTURES = {
    "deepseek2": Architecture("deepseek_v3", {}, latent=True),
    "llama": Architecture("llama", {}, paired_rope=True),
    "qwen2": Architecture("qwen2", {}),
    "qwen2moe": Architecture("qwen2_moe", {"norm_topk_prob": False}),
    "qwen3": Architecture("qwen3", {}),
    "qwen3moe": Architecture("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3next": Architecture("qwen3_next", {}),
    "qwen35moe": Architecture("qwen3_5_moe_text", {}, tiled_values=True),
}


MIXTRAL = Architecture("mixtral", {}, paired_rope=True)  # written as `llama` with experts


class GgufCheckpoint:
    """Opened and checked; tensors are read from the mapped file on demand. Raises ModelError."""

    format = "gguf"

    def __init__(self, path: Path, library: Library = torch) -> None:
        self._path, self.library = path, library
        reader = _open(path)
        name = _text(reader, "general.architecture", path)
        if name not in ARCHITECTURES:
            raise ModelError(f"{path}: architecture '{name}' is not supported; supported: {', '.join(sorted(ARCHITECTURES))}")
        self._arch = MIXTRAL if name == "llama" and "llama.expert_count" in reader.fields else ARCHITECTURES[name]
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._check_extent()
        self._config = Config(_config(reader, name, self._arch, self._tensors, path), str(path))
        self.spec = self._spec()
        self.skipped: list[str] = []
        self.pieces = self._place()
        self._check_types()
        # the library's own mapping goes with its views of it: address space may be limited
        self._tensors = {name: tensor._replace(data=None, field=None) for name, tensor in self._tensors.items()}
        del reader
        try:
            self._file = map_file(path)
        except (OSError, ValueError) as error:
            raise unreadable(path, error) from error

    def shape(self, source: str) -> tuple[int, ...]:
        return tuple(int(n) for n in reversed(self._tensors[source].shape))  # GGUF counts dimensions from the inside

    def kind(self, source: str) -> torch.dtype | str:
        name = self._tensors[source].tensor_type.name
        return self._dtype(name) if name in PLAIN else name

    def _dtype(self, name: str) -> torch.dtype:
        return getattr(self.library, PLAIN[name])

    def nbytes(self, source: str) -> int:
        return int(self._tensors[source].n_bytes)

    @property
    def files(self) -> tuple[MappedFile, ...]:
        return (self._file,)

    def read(self, piece: Piece) -> Weight:
        """The tensor as stored: a view of the mapped file."""
        tensor, shape = self._tensors[piece.source], self.shape(piece.source)
        name, raw = tensor.tensor_type.name, self._bytes(tensor.data_offset, int(tensor.n_bytes))
        if name in PLAIN:
            weight = raw.view(self._dtype(name)).view(shape)
            if not piece.name.endswith(".a_log"):
                return weight
            stored = weight.float().numpy().astype(np.float64)  # -exp(a_log)
            return self.library.from_numpy(np.log(-stored).astype(np.float32))
        return Quant(raw.view(*shape[:-1], -1), name, shape[-1])

    def whole(self, pieces: list[Piece]) -> Weight | None:
        """A canonical tensor where it lies in the mapped file, or gate and up of all experts as [E, 2, I, H] with the halves
        apart; None for one that has to be put together.
        """
        if any(p.rows is not None or p.turned or p.expert is not None or p.name.endswith(".a_log") for p in pieces):
            return None
        for tensor in (self._tensors[p.source] for p in pieces):
            self._file.need(int(tensor.data_offset), int(tensor.data_offset + tensor.n_bytes))
        if len(pieces) == 1:
            return self.read(pieces[0])
        gate, up = (self._tensors[p.source] for p in sorted(pieces, key=lambda p: p.part))
        apart, each = int(up.data_offset - gate.data_offset), int(gate.n_bytes)
        if apart < each or up.tensor_type != gate.tensor_type:
            return None
        experts, rows, cols = self.shape(pieces[0].source)
        name, raw = gate.tensor_type.name, self._bytes(gate.data_offset, apart + each)
        raw = raw.view(self._dtype(name)) if name in PLAIN else raw
        size, width = raw.element_size(), each // raw.element_size() // experts // rows
        both = raw.as_strided((experts, 2, rows, width), (rows * width, apart // size, width, 1))
        return both if name in PLAIN else Quant(both, name, cols)

    def let_go(self, pieces: list[Piece]) -> None:
        """These were copied out of the file and shall not be resident twice."""
        for piece in pieces:
            tensor = self._tensors[piece.source]
            self._file.let_go(int(tensor.data_offset), int(tensor.data_offset) + int(tensor.n_bytes))

    def _bytes(self, begin: int, size: int) -> torch.Tensor:
        return self.library.frombuffer(self._file.memory, dtype=self.library.uint8, count=size, offset=int(begin))

    def _spec(self) -> ModelSpec:
        # converters add the 1 of (1 + w) norms to the stored weight
        spec = replace(build_spec(self._config), eos_ids=self._config.ids("eos_token_id"), norm_plus_one=False)
        if self._arch.tiled_values:
            spec = _each_mixer(spec, DeltaNetSpec, lambda d: replace(d, o_tiled=True))
        if FREQUENCY_DIVISORS not in self._tensors:
            return spec
        divisors = tuple(self._tensors[FREQUENCY_DIVISORS].data.tolist())
        return _each_mixer(spec, AttentionSpec, lambda a: replace(a, rope=replace(a.rope, divisors=divisors)))

    def _place(self) -> list[Piece]:
        pieces = []
        for source in self._tensors:
            piece = place(source, source, NAMES | gguf_latent.NAMES if self._arch.latent else NAMES)
            parts = split(source, source, SPLITS, self.spec)
            if piece is not None:
                pieces.append(replace(piece, rows=self._row_order(piece.name)))
            elif parts:
                pieces += parts
            elif int(source.split(".")[1]) >= len(self.spec.layers) if source.startswith("blk.") else False:
                self.skipped.append(source)  # multi-token prediction, stored as further layers
            elif source != FREQUENCY_DIVISORS:
                raise ModelError(
                    f"{self._path}: tensor '{source}' is not part of a {self._arch.model_type} model; "
                    f"this kind of file is not supported"
                )
        return pieces

    def _row_order(self, name: str) -> tuple[int, ...] | None:
        """Where this architecture's converter moved rows, the order that moves them back. Whole rows, so blocks stay intact."""
        layer, _, local = name.partition(".")
        mixer = self.spec.layers[int(layer)].mixer if local and int(layer) < len(self.spec.layers) else None
        if self._arch.paired_rope and local in ("attn.q", "attn.q_bias"):
            return unpaired_rows(mixer.heads, mixer.head_dim)
        if self._arch.paired_rope and local in ("attn.k", "attn.k_bias"):
            return unpaired_rows(mixer.kv_heads, mixer.head_dim)
        if self._arch.tiled_values and isinstance(mixer, DeltaNetSpec):
            keys, repeat = mixer.key_heads, mixer.value_heads // mixer.key_heads
            if local in ("delta.qkv", "delta.conv"):
                return untiled_rows(2 * keys * mixer.key_dim, keys, repeat, mixer.value_dim)
            if local == "delta.z":
                return untiled_rows(0, keys, repeat, mixer.value_dim)
            if local in ("delta.a", "delta.b", "delta.a_log", "delta.dt_bias"):
                return untiled_rows(0, keys, repeat, 1)
        return None

    def _check_types(self) -> None:
        """Every block type must be one the reference dequantizer knows."""
        for tensor in self._tensors.values():
            if tensor.tensor_type.name not in PLAIN and tensor.tensor_type not in _type_traits:
                raise ModelError(
                    f"{self._path}: tensor '{tensor.name}' is stored as {tensor.tensor_type.name}, which is not supported; "
                    f"use another quantization of this model, such as Q8_0 or Q4_K_M"
                )

    def _check_extent(self) -> None:
        size = self._path.stat().st_size
        for tensor in self._tensors.values():
            if tensor.data_offset + tensor.n_bytes > size:
                raise unreadable(self._path, f"tensor '{tensor.name}' ends beyond the end of the file")


class _Reader(GGUFReader):
    """Steps over long arrays: the library builds several numpy objects for each string of a vocabulary, ten seconds for 150K
    tokens and their merges, and nothing here reads them. A field stepped over has no contents.
    """

    def _get_field_parts(self, orig_offs: int, raw_type: int):
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind, length = int(self._get(orig_offs, np.uint32)[0]), int(self._get(orig_offs + 4, np.uint64)[0])
        if length <= LONGEST_ARRAY or kind == GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        end = orig_offs + 12
        if kind == GGUFValueType.STRING:
            size = struct.Struct(">Q" if self.endianess == GGUFEndian.BIG else "<Q")
            data, length_at = memoryview(self.data), size.unpack_from  # an index into the array itself costs ten times as much
            try:
                for _ in range(length):
                    end += 8 + length_at(data, end)[0]
            except (struct.error, OverflowError):
                end = len(data) + 1
            if end > len(data):
                raise ValueError("an array of strings ends beyond the end of the file")
        else:
            end += length * np.dtype(self.gguf_scalar_to_np[GGUFValueType(kind)]).itemsize
        return end - orig_offs, [], [], [GGUFValueType.ARRAY, GGUFValueType(kind)]


def _open(path: Path) -> GGUFReader:
    try:
        return _Reader(path, "c")  # a private mapping: torch warns about read-only memory
    except Exception as error:  # the reader trusts the file: a torn one raises whatever numpy stumbles over
        raise unreadable(path, error) from error


def _config(reader, arch: str, traits: Architecture, tensors: dict, path: Path) -> dict[str, object]:
    """The file's metadata under the names a `config.json` of the family would use. Raises ModelError for odd values."""
    fields = {key: field.contents() for key, field in reader.fields.items() if key in EOS_KEYS or key.startswith(arch + ".")}
    own = Config({key.removeprefix(arch + "."): value for key, value in fields.items()}, f"{path} ({arch}.*)")
    config: dict[str, object] = {"model_type": traits.model_type, **traits.constants}
    for theirs, ours in COMMON_KEYS.items():
        if f"{arch}.{theirs}" in fields:
            config[ours] = fields[f"{arch}.{theirs}"]
    if "token_embd.weight" not in tensors:
        raise ModelError(f"{path}: tensor 'token_embd.weight' is missing; the file is no text model or is incomplete")
    layers = own.int("block_count") - own.natural("nextn_predict_layers", 0)
    config["num_hidden_layers"] = layers
    if own.has("attention.recurrent_layers"):
        recurrent = own.items("attention.recurrent_layers")[: max(0, layers)]
        config["layer_types"] = ["linear_attention" if r else "full_attention" for r in recurrent]
    if own.has("ssm.inner_size"):
        config["linear_value_head_dim"] = own.int("ssm.inner_size") // own.int("ssm.time_step_rank")
    config["vocab_size"] = int(tensors["token_embd.weight"].shape[1])
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config["use_sliding_window"] = "sliding_window" in config
    config["attention_bias"] = "blk.0.attn_output.bias" in tensors
    ids = Config({key: fields.get(key) for key in EOS_KEYS}, str(path))
    config["eos_token_id"] = list(dict.fromkeys(i for key in EOS_KEYS for i in ids.ids(key)))
    rotated, scaling = own.int("rope.dimension_count", None), own.text("rope.scaling.type", None)
    head = own.int("attention.key_length", None) or max(1, own.int("embedding_length") // own.int("attention.head_count"))
    config["partial_rotary_factor"] = rotated / head if rotated else None
    mscale = None
    if traits.latent:
        config |= gguf_latent.config(own)
        mscale = config.pop("mscale_all_dim", None)
    if scaling and scaling != "none":
        config["rope_scaling"] = {
            "rope_type": scaling,
            "factor": fields.get(f"{arch}.rope.scaling.factor"),
            "original_max_position_embeddings": fields.get(f"{arch}.rope.scaling.original_context_length"),
            "mscale": mscale,  # no file says whether they differ, no published model has them differ
            "mscale_all_dim": mscale,
        }
    return config


EOS_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))


def _text(reader, key: str, path: Path) -> str:
    value = reader.fields[key].contents() if key in reader.fields else None
    if not isinstance(value, str):
        raise ModelError(f"{path}: metadata '{key}' is missing; the file is incomplete or no model, download it again")
    return value


def _each_mixer(spec: ModelSpec, kind: type, change: Callable) -> ModelSpec:
    layers = (replace(x, mixer=change(x.mixer)) if isinstance(x.mixer, kind) else x for x in spec.layers)
    return replace(spec, layers=tuple(layers))
