"""Loads exports where this package cannot be imported; test_transformers.py runs it in a process of its own.

Arguments: the folder of the exports, then as JSON token ids, names of masked language models and questions. It prints
facts as JSON and leaves tensors.safetensors in the folder.
"""

import importlib.util
import json
import sys

ABSENT = ("gmlp_scale", "pydantic", "sentencepiece", "deepspeed")  # deepspeed needs pydantic
sys.modules.update(dict.fromkeys(ABSENT))  # to import one of them is a ModuleNotFoundError

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import (  # noqa: E402
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    pipeline,
)

torch.set_num_threads(1)
folder, ids = sys.argv[1], torch.tensor(json.loads(sys.argv[2]))
tensors, facts = {}, {}


def load(auto, name, **settings):
    return auto.from_pretrained(f"{folder}/{name}", trust_remote_code=True, **settings)


with torch.no_grad():
    for kind in json.loads(sys.argv[3]):
        model = load(AutoModelForMaskedLM, kind)
        tensors[f"{kind} whole"] = model(ids).logits
        tensors[f"{kind} short"] = model(ids[:, :7]).logits
        mixed = ids[:, :9].where(torch.arange(9) < torch.tensor([[9], [7], [5]]), 0)
        tensors[f"{kind} batch"] = model(mixed).logits[2, :5]
        tensors[f"{kind} mask"] = model(ids[:, :9], attention_mask=(mixed != 0).long()).logits[2, :5]
        tensors[f"{kind} alone"] = model(ids[2:, :5]).logits[0]
    try:
        model(torch.cat([ids, ids], dim=1))
    except ValueError as error:
        facts["too long"] = str(error)

    model = load(AutoModelForMaskedLM, "amlp")
    tensors["hidden states"] = load(AutoModel, "amlp")(ids).last_hidden_state
    facts["hidden size"] = model.config.hidden_size
    facts["loss"] = model(ids, labels=ids.where(ids % 3 == 0, -100)).loss.item()
    model.save_pretrained(f"{folder}/saved")
    load(AutoTokenizer, "amlp").save_pretrained(f"{folder}/saved")
    padded = ids.where(torch.arange(ids.shape[1]) < 7, 0)
    tensors["padded"] = load(AutoModelForMaskedLM, "bert-relative")(padded).logits[:, :7]
    tensors["saved"] = load(AutoModelForMaskedLM, "saved")(ids).logits
    facts["saved tokenizer"] = load(AutoTokenizer, "saved")("the <mask> cat")["input_ids"]
    model.save_pretrained(f"{folder}/in_parts", max_shard_size="10KB")
    scratch = AutoModelForMaskedLM.from_config(model.config, trust_remote_code=True)
    facts["spatial bias"] = scratch.model.blocks[0].gating.bias.unique().tolist()
    facts["spatial weight"] = scratch.model.blocks[0].gating.weight.abs().max().item()

    fill = pipeline("fill-mask", model=f"{folder}/amlp", trust_remote_code=True)
    facts["filled"] = fill("the <mask> dog")
    texts = ["the <mask> dog", "a <mask>", "the <mask> see"]
    facts["filled in a batch"] = [fill(texts, batch_size=3), [fill(text) for text in texts]]

    tokenizer = load(AutoTokenizer, "amlp")
    features = [tokenizer("the cat"), tokenizer("a dog went over")]
    padded = DataCollatorWithPadding(tokenizer)([feature | {"label": 1} for feature in map(dict, features)])
    torch.manual_seed(0)
    masked = DataCollatorForLanguageModeling(tokenizer)(features)
    tagged = [dict(feature) | {"labels": [1] * len(feature["input_ids"])} for feature in features]
    collated = {"padding": padded, "masking": masked, "tags": DataCollatorForTokenClassification(tokenizer)(tagged)}
    facts["collated"] = {name: {key: value.tolist() for key, value in c.items()} for name, c in collated.items()}
    facts["losses"] = [
        load(AutoModelForMaskedLM, "amlp")(**masked).loss.item(),
        load(AutoModelForSequenceClassification, "classifier")(**padded).loss.item(),
    ]

    for auto in (AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoModelForQuestionAnswering):
        model = load(auto, "amlp")  # a new head on the pretrained trunk
        facts[auto.__name__] = [type(model).__name__, model.model.dropout.p]
    outputs = load(AutoModel, "amlp")(ids[:, :7], output_hidden_states=True, output_attentions=True)
    facts["shapes"] = [[list(tensor.shape) for tensor in kept] for kept in (outputs.hidden_states, outputs.attentions)]
    load(AutoModelForTokenClassification, "amlp", num_labels=5).save_pretrained(f"{folder}/tagger")
    load(AutoTokenizer, "amlp").save_pretrained(f"{folder}/tagger")
    tag = pipeline("token-classification", model=f"{folder}/tagger", trust_remote_code=True)
    tagged = tag(["the cat", "a dog went over"], batch_size=2)
    facts["tagged"] = [[{name: entry[name] for name in ("index", "start", "end")} for entry in tags] for tags in tagged]
    tensors["class logits"] = load(AutoModelForSequenceClassification, "classifier")(ids[:, :7]).logits
    spans = load(AutoModelForQuestionAnswering, "spans")(ids[:, :7])
    tensors["first logits"], tensors["last logits"] = spans.start_logits, spans.end_logits
    classify = pipeline("text-classification", model=f"{folder}/classifier", trust_remote_code=True)
    facts["classified"] = classify({"text": "the cat", "text_pair": "a dog"}, top_k=None)
    texts = ["the cat", "a", "a dog see"]
    facts["classified in a batch"] = [classify(texts, batch_size=3), [classify(text)[0] for text in texts]]
    regressor = load(AutoModelForSequenceClassification, "regressor")
    facts["squared error"] = regressor(ids[:, :7], labels=torch.tensor([0.0, 2.5, 5.0])).loss.item()
    measure = pipeline("text-classification", model=f"{folder}/regressor", trust_remote_code=True)
    facts["measured"] = measure({"text": "the cat", "text_pair": "a dog"}, top_k=None)
    answer = pipeline("question-answering", model=f"{folder}/spans", trust_remote_code=True)
    facts["answers"] = answer(json.loads(sys.argv[4]))
    facts["answers in a batch"] = answer(json.loads(sys.argv[4]), batch_size=4)
    older = pipeline("question-answering", model=f"{folder}/older spans", trust_remote_code=True)
    facts["answers of older spans"] = older(json.loads(sys.argv[4]))
    facts["answers of other windows"] = answer(json.loads(sys.argv[4]), document_stride=1)
    facts["answer or nothing"] = answer(**json.loads(sys.argv[4])[0], handle_impossible_answer=True)

facts["imported"] = [name for name in sys.modules if name.partition(".")[0] in ABSENT and sys.modules[name]]
if importlib.util.find_spec("accelerate"):
    from transformers import Trainer, TrainingArguments

    model = load(AutoModelForSequenceClassification, "classifier")
    rows = [dict(tokenizer(text)) | {"label": number % 3} for number, text in enumerate(["the cat", "a", "a dog"] * 8)]
    settings = TrainingArguments(
        f"{folder}/trainer",
        num_train_epochs=5,
        learning_rate=1e-2,
        report_to="none",
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(model, settings, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    facts["losses of Trainer"] = [before, trainer.evaluate()["eval_loss"]]
save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, f"{folder}/tensors.safetensors")
print(json.dumps(facts))
