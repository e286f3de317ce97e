"""How small families of transformers are made: sizes by their names, and what single families need besides."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LAYERS, WIDTH, FEED_FORWARD, HEADS, VOCABULARY, TIME, BATCH, IMAGE, SOUND = 3, 128, 256, 4, 256, 64, 4, 32, 2000
WORDS = (5, 200)
"""Ordinary tokens. Special ones of a vocabulary that was made small are above these."""

KEPT, KEYS = -1, -2
SIZES: tuple[tuple[str, int], ...] = (
    ("*layers_per_* *_layer_interval num_nextn_predict_layers num_adapter_layers num_kv_shared_layers", KEPT),
    (
        "num_hidden_layers num_layers n_layers n_layer *encoder_layers *decoder_layers num_blocks *_num_hidden_layers",
        LAYERS,
    ),
    ("max_window_layers num_hidden_groups", LAYERS),
    ("vocab_size *_vocab_size vocab_size_* max_vocab_size", VOCABULARY),
    ("num_key_value_heads num_kv_heads *_num_key_value_heads", KEYS),
    (
        "num_attention_heads num_heads n_head n_heads *attention_heads *_num_heads mamba_n_heads linear_num_*heads",
        HEADS,
    ),
    ("head_dim *_head_dim d_kv d_head attention_head_size kv_channels attention_head_dim mamba_d_head", WIDTH // HEADS),
    ("*intermediate_size* *ffn_dim* d_ff dff dim_ff d_inner n_inner *ffn_hidden_size feed_forward_size", FEED_FORWARD),
    ("hidden_dim", FEED_FORWARD),
    ("hidden_size *_hidden_size d_model n_embd emb_dim embedding_size *put_embedding_size word_embed_proj_dim", WIDTH),
    ("embed_dim dim lru_width", WIDTH),
    (
        "*max_position_embeddings n_positions n_ctx max_source_positions max_target_positions max_text_positions",
        2 * TIME,
    ),
    ("max_seq_len context_length max_2d_position_embeddings", 2 * TIME),
    ("num_experts n_routed_experts num_local_experts moe_num_experts num_routed_experts", 4),
    ("num_experts_per_tok num_experts_per_token moe_topk moe_k", 2),
    ("n_group topk_group num_expert_group", 1),
    ("q_lora_rank kv_lora_rank o_lora_rank", 32),
    ("image_size", IMAGE),
    ("first_k_dense_replace num_dense_layers", 1),
    ("num_mel_bins input_feat_per_channel", 16),
    ("patch_size", 8),
    ("num_conv_pos_embeddings", 16),
    ("num_conv_pos_embedding_groups", 4),
)
"""Names of sizes with the most that they may be; the first that matches counts. Keys have half as many heads as queries, unless the
family has as many."""
LISTS: tuple[tuple[str, int], ...] = (
    ("depths num_blocks layer_repeats", 1),
    ("hidden_sizes embed_dims encoder_hidden_sizes stage_out_channels stage_mid_channels stage_in_channels", 32),
)
"""Likewise of lists with an entry for each stage: the most of the first entry, and of the others in proportion."""
UNSET = {"head_dim": WIDTH // HEADS, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
"""What some families leave out where they ought not to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Except:
    """What a family needs beside small sizes.

    Attributes:
        config: attributes of its configuration; a dict for a part's.
        batch: inputs, as functions of those that every family of its kind gets.
        why_not: why it has no row of its own, in words; empty where it has one.
    """

    config: dict[str, Any] | None = None
    batch: dict[str, Callable[[dict[str, Tensor]], Tensor]] | None = None
    why_not: str = ""


_MAMBA = {"mamba_d_head": 64, "mamba_n_heads": 4}
_SWIN = {"window_size": 4, "image_size": 64, "depths": [1, 1], "num_heads": [3, 6], "patch_size": 4}
_CONVOLUTIONS = {"conv_dim": (64, 64), "conv_kernel": (10, 3), "conv_stride": (5, 4), "num_feat_extract_layers": 2}
_HGNET = {
    "stem_channels": (3, 16, 16),
    "stage_in_channels": (16, 32, 64, 128),
    "stage_mid_channels": (16, 32, 64, 128),
    "stage_out_channels": (32, 64, 128, 256),
    "stage_numb_of_layers": (2, 2, 2, 2),
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_SLIDING_HEADS = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
_DOTS3 = {
    "index_n_heads": 4,
    **{f"swa_{name}": size for name, size in {**_SLIDING_HEADS, "q_lora_rank": 32, "kv_lora_rank": 32}.items()},
}
_DOTS3_PARTS = {
    "text_config": _DOTS3,
    "vision_config": {"adapter_in_dim": WIDTH, "adapter_out_dim": WIDTH},
    "audio_config": {"adapter_input_size": WIDTH, "adapter_out_dim": WIDTH},
}


def _drawn(*size: int) -> Callable[[dict[str, Tensor]], Tensor]:
    """Random numbers of this size for every element of a batch, others for each batch."""
    return lambda found: torch.randn(BATCH, *size, generator=torch.Generator().manual_seed(int(found["labels"].sum())))


_FRAMES = {"input_features": _drawn(2 * TIME, 16)}
"""Sound as frames by bins, where most have bins by frames."""
_MASKED_FRAMES = {**_FRAMES, "attention_mask": lambda _: torch.ones(BATCH, 2 * TIME, dtype=torch.long)}
"""Connectionist temporal classification counts frames by their mask."""
_INDEXER = {
    "indexer_n_heads": HEADS,
    "indexer_kv_heads": 1,
    "indexer_head_dim": WIDTH // HEADS,
    "indexer_budget": 32,
    "indexer_compress_ratio": 4,
}
_NUM_CODEBOOKS = 9
_CODES = {"labels": lambda found: found["input_ids"].T[None].contiguous()}
"""Rows of a batch are the codebooks of one sequence, which labels have last."""
_DRAFTS = "it drafts for a larger model, whose keys and values it takes"
_TIMM = "its blocks are those of the package timm"
_AUDIO_CODEC = "its audio codec is no transformer and is not made small"
_WHOLE = "text alone does not reach its other half, which has no batch of its own here"

EXCEPTIONS: dict[str, Except] = {
    "bamba": Except(config=_MAMBA),
    "granitemoehybrid": Except(config=_MAMBA),
    "mamba2": Except(config={"num_heads": 4, "head_dim": 64, "n_groups": 1, "state_size": 16}),
    "codegen": Except(config={"rotary_dim": 16}),
    "cohere_compass_text": Except(config={"rope_parameters": {"full_attention": _ROPE}}),
    "dbrx": Except(config={"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}}),
    "dory": Except(config={"n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1}),
    "dots1": Except(config={"n_routed_experts": 4, "n_shared_experts": 1}),
    "dots3_note": Except(config=_DOTS3_PARTS),
    "dots3_note_text": Except(config=_DOTS3),
    "esm": Except(config={"vocab_size": VOCABULARY, "pad_token_id": 1}),
    "esmc": Except(config={"vocab_size": VOCABULARY}),
    "falcon_h1": Except(config={**_MAMBA, "mamba_d_ssm": 256}),
    "gemma3n_text": Except(config={"num_kv_shared_layers": 1, "intermediate_size": FEED_FORWARD}),
    "gemma4_assistant": Except(why_not=_DRAFTS),
    "gemma4_unified_assistant": Except(why_not=_DRAFTS),
    "lfm2_moe": Except(config={"layer_types": ["conv", "full_attention", "conv"]}),
    "longcat_flash": Except(config={"zero_expert_num": 2, "qk_head_dim": 2 * WIDTH // HEADS}),
    "musicgen": Except(batch=_CODES),
    "musicgen_melody": Except(batch=_CODES),
    "nemo_speechlm": Except(config={"text_config": {"n_groups": 2}}),
    "nemotron": Except(config={"num_key_value_heads": 2}),
    "nemotron_h": Except(config={"n_groups": 2}),
    "gptj": Except(config={"rotary_dim": 16}),
    "qwen4_exp": Except(config={"text_config": _INDEXER}),
    "qwen4_exp_text": Except(config=_INDEXER),
    "reformer": Except(why_not="it keeps no activations: its layers are reversible, and run backward by themselves"),
    "xmod": Except(config={"default_language": "en_XX"}),
    "voxtral_realtime": Except(batch={"input_features": _drawn(16, 8 * TIME)}),
    "zamba": Except(
        config={
            "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
            "attention_hidden_size": 2 * WIDTH,
            "attention_head_dim": 2 * WIDTH // HEADS,
        }
    ),
    "bit": Except(config={"num_groups": 4}),
    "efficientnet": Except(config={"width_coefficient": 0.2, "depth_coefficient": 1.0}),
    "hgnet_v2": Except(config=_HGNET),
    "hiera": Except(config={"embed_dim": 32, "depths": [1, 1, 1, 1], "image_size": [64, 64]}),
    "levit": Except(config={"image_size": 64, "patch_size": 16}),
    "mobilevitv2": Except(config={"image_size": 64, "width_multiplier": 0.5}),
    "siglip2": Except(
        batch={
            "pixel_values": lambda found: found["pixel_values"].view(BATCH, 16, -1),
            "pixel_attention_mask": lambda _: torch.ones(BATCH, 16, dtype=torch.long),
            "spatial_shapes": lambda _: torch.full((BATCH, 2), 4),
        }
    ),
    "textnet": Except(config={"stem_out_channels": 32, "image_size": [64, 64]}),
    "swin": Except(config=_SWIN),
    "donut-swin": Except(config=_SWIN),
    "swinv2": Except(config=_SWIN),
    "hubert": Except(config=_CONVOLUTIONS),
    "wav2vec2": Except(config=_CONVOLUTIONS),
    "wavlm": Except(config=_CONVOLUTIONS),
    "unispeech": Except(config=_CONVOLUTIONS),
    "unispeech-sat": Except(config=_CONVOLUTIONS),
    "data2vec-audio": Except(config=_CONVOLUTIONS),
    "sew": Except(config=_CONVOLUTIONS),
    "sew-d": Except(config=_CONVOLUTIONS),
    "speecht5": Except(config=_CONVOLUTIONS),
    "omniasr_ctc": Except(
        config={"audio_config": _CONVOLUTIONS},
        batch={
            "input_values": lambda found: found["input_values"][:, None],
            "padding_mask": lambda _: torch.ones(BATCH, SOUND, dtype=torch.long),
        },
    ),
    "speech-encoder-decoder": Except(config={"encoder": _CONVOLUTIONS}, batch={"inputs": _drawn(SOUND)}),
    "canary": Except(batch=_FRAMES),
    "cohere_asr": Except(batch=_FRAMES),
    "lasr_ctc": Except(batch=_MASKED_FRAMES),
    "parakeet_ctc": Except(batch=_MASKED_FRAMES),
    "speech_to_text": Except(config={"conv_channels": WIDTH}, batch=_FRAMES),
    "granite_speech5_ctc": Except(batch={**_MASKED_FRAMES, "input_features": _drawn(2 * TIME, 64)}),
    "dia": Except(
        batch={
            "decoder_input_ids": lambda found: found["input_ids"][..., None].repeat(1, 1, _NUM_CODEBOOKS),
            "labels": lambda found: found["input_ids"].repeat_interleave(_NUM_CODEBOOKS, 0),
        }
    ),
    "fun_asr_nano": Except(
        config={
            "adaptor_config": {"intermediate_size": WIDTH // 4},
            "audio_config": {"num_timestamp_prediction_layers": 1, "num_stacked_frames": 4},
        },
        batch={
            "input_features": _drawn(16, 64),
            "input_features_mask": lambda _: torch.ones(BATCH, 16, dtype=torch.long),
            "input_ids": lambda found: torch.cat([torch.full((BATCH, 16), WORDS[1]), found["input_ids"][:, 16:]], 1),
        },
    ),
    "moonshine_streaming": Except(config={"num_key_value_heads": HEADS}),
    "audio-spectrogram-transformer": Except(
        config={"max_length": 125},
        batch={
            "input_values": lambda found: found["input_values"].view(BATCH, 125, 16),
            "labels": lambda found: found["labels"][:, 0] % 2,
        },
    ),
    "wav2vec2-bert": Except(config={"vocab_size": VOCABULARY}, batch={"input_features": _drawn(2 * TIME, 160)}),
    "wav2vec2-conformer": Except(config={"vocab_size": 32, **_CONVOLUTIONS}),
    "whisper": Except(config={"max_source_positions": TIME}),
    "dinat": Except(why_not="its attention is that of the package natten"),
    "gemma3n": Except(why_not=_TIMM),
    "timm_wrapper": Except(why_not=_TIMM),
    "vibevoice": Except(why_not=_AUDIO_CODEC),
    "vibevoice_asr": Except(why_not=_AUDIO_CODEC),
    "kyutai_speech_to_text": Except(why_not=_AUDIO_CODEC),
    "imagegpt": Except(why_not="its images are tokens, which it takes as text"),
    "shieldgemma2": Except(why_not=_WHOLE),
    "git": Except(why_not=_WHOLE),
    "perceiver": Except(why_not="its decoder of images and sounds is not made small"),
    "blt": Except(why_not="its tables of hashed bytes are not made small"),
}
