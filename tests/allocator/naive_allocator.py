"""torch's caching allocator a second time, as a list of intervals that is gone through from end to end."""

MIB = 2**20
ENDLESS = 2**60


class Naive:
    """A pool: [segment, start, size, state] in order, the state being "used", "free" or "unmapped"."""

    def __init__(self, expandable, small):
        self.expandable, self.small = expandable, small
        self.page = 2 * MIB if small else 20 * MIB
        self.rows = [[0, 0, ENDLESS, "unmapped"]] if expandable else []

    @property
    def reserved(self):
        return sum(size for _, _, size, state in self.rows if state != "unmapped")

    @property
    def used(self):
        return sum(size for _, _, size, state in self.rows if state == "used")

    def fits(self, size):
        found = [at for at, row in enumerate(self.rows) if row[3] == "free" and row[2] >= size]
        found.sort(key=lambda at: (self.rows[at][2], self.rows[at][:2]))
        if not found:
            return None
        best = 0
        while self.expandable and best + 1 < len(found) and self.reach(found[best + 1]) < self.reach(found[best]):
            best += 1
        return found[best]

    def reach(self, at):
        after = self.rows[at + 1] if at + 1 < len(self.rows) else None
        return self.rows[at][2] + (after[2] if after and after[3] == "unmapped" else 0)

    def use(self, at, size):
        segment, start, room, _ = self.rows[at]
        left = room - size
        if left >= 512 if self.small or self.expandable else left > MIB:
            self.rows[at : at + 1] = [[segment, start, size, "used"], [segment, start + size, left, "free"]]
        else:
            self.rows[at][3] = "used"
        return segment, start

    def new_segment(self, size):
        segment = 1 + max((row[0] for row in self.rows), default=-1)
        self.rows.append([segment, 0, size, "free"])
        return len(self.rows) - 1

    def expand(self, size):
        """Map the first pages of the lowest run of free and unmapped rows that is long enough; where it begins."""
        for at, row in enumerate(self.rows):
            if row[3] != "unmapped":
                continue
            first = at - 1 if at and self.rows[at - 1][3] == "free" else at
            run = []
            for other in self.rows[first:]:
                if other[3] == "used":
                    break
                run.append(other)
            if sum(other[2] for other in run) >= size:
                break
        start = self.rows[first][1]
        while True:
            self.merge()
            first = next(i for i, other in enumerate(self.rows) if other[1] <= start < other[1] + other[2])
            have = self.rows[first][2] if self.rows[first][3] == "free" else 0
            if have >= size:
                return first
            at = first + 1 if have else first
            _, begin, room, state = self.rows[at]
            assert state == "unmapped"
            grown = min(room, -(-(size - have) // self.page) * self.page)
            self.rows[at : at + 1] = [[0, begin, grown, "free"], [0, begin + grown, room - grown, "unmapped"]]
            self.rows = [other for other in self.rows if other[2]]

    def merge(self):
        merged = []
        for row in self.rows:
            last = merged[-1] if merged else None
            if last and last[0] == row[0] and last[3] == row[3] != "used":
                last[2] += row[2]
            else:
                merged.append(row)
        self.rows = merged

    def drop(self, segment, start):
        (row,) = (row for row in self.rows if row[:2] == [segment, start])
        row[3] = "free"
        self.merge()

    def shrink(self):
        kept = []
        for row in self.rows:
            segment, start, size, state = row
            if state != "free":
                kept.append(row)
            elif not self.expandable:
                if sum(other[0] == segment for other in self.rows) > 1:
                    kept.append(row)
            else:
                low, high = -(-start // self.page) * self.page, (start + size) // self.page * self.page
                if low >= high:
                    kept.append(row)
                    continue
                kept += [
                    [0, start, low - start, "free"],
                    [0, low, high - low, "unmapped"],
                    [0, high, start + size - high, "free"],
                ]
        self.rows = [row for row in kept if row[2]]
        self.merge()


class NaiveAllocator:
    def __init__(self, expandable, limit=None):
        self.pools = [Naive(expandable, small=True), Naive(expandable, small=False)]
        self.expandable, self.limit = expandable, limit
        self.releases = self.failures = 0

    def allocate(self, size):
        size = -(-size // 512) * 512
        pool = self.pools[size > MIB]
        at = pool.fits(size)
        if at is None:
            asked = 2 * MIB if size <= MIB else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            if self.limit is not None and self.reserved + asked > self.limit:
                self.releases += 1
                for each in self.pools:
                    each.shrink()
                self.failures += self.reserved + asked > self.limit
            at = pool.expand(size) if self.expandable else pool.new_segment(asked)
        return pool, *pool.use(at, size)

    @property
    def reserved(self):
        return sum(pool.reserved for pool in self.pools)

    @property
    def used(self):
        return sum(pool.used for pool in self.pools)
