import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gmlp_scale.prepare.write_shards import DocumentRows, PackedRows, is_heldout

documents = st.lists(st.lists(st.integers(5, 60_000), max_size=40), max_size=20)


def rows_of(packing, sequence_length, documents, every):
    rows = [np.empty((0, sequence_length), "<u2")]
    for number, ids in enumerate(documents):
        packing.add(np.array(ids, np.int32))
        if number % every == 0:
            rows.append(packing.take())
    return np.concatenate([*rows, packing.take_last()])


@given(documents, st.integers(4, 24), st.integers(1, 5))
def test_packed_rows_hold_the_stream_of_documents(documents, sequence_length, every):
    rows = rows_of(PackedRows(sequence_length), sequence_length, documents, every)
    assert rows.dtype == np.dtype("<u2") and rows.shape[1] == sequence_length
    assert (rows[:, 0] == 2).all()
    stream = [token for ids in documents for token in [*ids, 3]]
    found = rows[:, 1:].reshape(-1)
    assert found[: len(stream)].tolist() == stream
    assert (found[len(stream) :] == 0).all() and len(found) - len(stream) < sequence_length - 1


@given(documents, st.integers(4, 24), st.integers(1, 5))
def test_document_rows_hold_one_document_each(documents, sequence_length, every):
    rows = rows_of(DocumentRows(sequence_length), sequence_length, documents, every)
    found = []
    for row in rows.tolist():
        end = row.index(3)
        assert row[0] == 2 and set(row[end + 1 :]) <= {0}
        found.append(row[1:end])
    longest = sequence_length - 2
    expected = [ids[start : start + longest] for ids in documents for start in range(0, len(ids), longest)]
    assert found == expected


def test_held_out_documents_are_chosen_by_their_text():
    texts = [f"document {number}".encode() for number in range(4000)]
    chosen = [is_heldout(text, 0.1) for text in texts]
    assert chosen == [is_heldout(text, 0.1) for text in texts]
    assert 330 < sum(chosen) < 470
    assert all(later or not earlier for earlier, later in zip(chosen, (is_heldout(t, 0.2) for t in texts), strict=True))
    assert not any(is_heldout(text, 0) for text in texts)
