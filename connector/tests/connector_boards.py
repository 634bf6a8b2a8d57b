"""A lease board that only remembers what ended."""


class RecordedBoard:
    def __init__(self):
        self.ended = []

    def end(self, sequence):
        self.ended.append(sequence)
