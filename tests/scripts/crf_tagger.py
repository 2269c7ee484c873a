"""A tagger of words: a bidirectional LSTM below a conditional random field (Huang et al. 2015, arXiv:1508.01991)."""

import torch
import torch.nn as nn
import torch.optim as optim
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

SENTENCES = """the/O river/B-LOC bank/I-LOC is/O closed/O
anna/B-PER lives/O in/O new/B-LOC york/I-LOC
yesterday/O john/B-PER smith/I-PER met/O anna/B-PER
rain/O fell/O on/O the/O green/B-LOC hills/I-LOC of/I-LOC wales/I-LOC
smith/B-PER sings/O
the/O hills/O and/O the/O river/O"""
TEXT = [[pair.split("/") for pair in line.split()] for line in SENTENCES.splitlines()]
WORDS = {word: i + 1 for i, word in enumerate(sorted({word for line in TEXT for word, _ in line}))}
TAGS = {tag: i for i, tag in enumerate(sorted({tag for line in TEXT for _, tag in line}))}


class Tagged(Dataset):
    def __len__(self):
        return len(TEXT)

    def __getitem__(self, i):
        return torch.tensor([WORDS[word] for word, _ in TEXT[i]]), torch.LongTensor([TAGS[tag] for _, tag in TEXT[i]])


def collate(batch):
    words, tags = zip(*batch, strict=True)
    return pad_sequence(words, batch_first=True), pad_sequence(tags, batch_first=True)


class CRF(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.start, self.end, self.transitions = (nn.Parameter(torch.empty(s)) for s in ((n,), (n,), (n, n)))
        for p in self.parameters():
            nn.init.uniform_(p, -0.1, 0.1)

    def forward(self, emissions, tags, mask):
        return (self.normalizer(emissions, mask) - self.score(emissions, tags, mask)).mean()

    def score(self, emissions, tags, mask):
        rows = torch.arange(tags.size(0))
        last = mask.long().sum(1) - 1
        taken = emissions.gather(2, tags.unsqueeze(2)).squeeze(2) * mask
        moves = self.transitions[tags[:, :-1], tags[:, 1:]] * mask[:, 1:]
        return self.start[tags[:, 0]] + taken.sum(1) + moves.sum(1) + self.end[tags[rows, last]]

    def normalizer(self, emissions, mask):
        alpha = self.start + emissions[:, 0]
        for t in range(1, emissions.size(1)):
            following = torch.logsumexp(alpha[:, :, None] + self.transitions + emissions[:, t, None, :], dim=1)
            alpha = torch.where(mask[:, t].unsqueeze(1), following, alpha)
        return torch.logsumexp(alpha + self.end, dim=1)

    @torch.no_grad()
    def decode(self, emissions):
        """The best tags of one sentence. emissions: (L, n)"""
        best = self.start + emissions[0]
        back = []
        for emission in emissions[1:]:
            best, chosen = (best.unsqueeze(1) + self.transitions + emission).max(dim=0)
            back.append(chosen)
        path = [int((best + self.end).argmax())]
        for chosen in reversed(back):
            path.append(chosen[path[-1]].item())
        return path[::-1]


class Tagger(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.embed = nn.Embedding(len(WORDS) + 1, width, padding_idx=0)
        self.lstm = nn.LSTM(width, width // 2, num_layers=2, bidirectional=True, batch_first=True)
        self.tag = nn.Linear(width, len(TAGS))
        self.crf = CRF(len(TAGS))

    def forward(self, words):
        return self.tag(self.lstm(self.embed(words))[0])


torch.manual_seed(1)
model = Tagger()
optimizer = optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=1e-4, nesterov=True)
schedule = optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
for _ in range(6):
    total = 0.0
    for words, tags in DataLoader(Tagged(), batch_size=3, shuffle=True, collate_fn=collate):
        model.zero_grad()
        loss = model.crf(model(words), tags, words.ne(0))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=5.0)
        optimizer.step()
        total += loss.item()
    schedule.step(total)
model.eval()
right = sum(a == b for x, y in Tagged() for a, b in zip(model.crf.decode(model(x[None])[0]), y.tolist(), strict=True))
print(f"loss {total:.4f}, {right} of {sum(map(len, TEXT))} tags are right, rate {optimizer.param_groups[0]['lr']}")
