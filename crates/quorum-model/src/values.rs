//! A model of fenced values: ARCHITECTURE.md describes the protocol in the section "Fenced values of a quorum", and this
//! file follows that section rule by rule.
//!
//! One value is on three nodes, and up to four calls read and write it at the same time. Time is counted in ticks. All
//! clocks are equal; [`Rules::ahead`] stands for differences between them. The value has no ttl.

mod tests;

use stateright::{Model, Property};

use crate::{NODES, START, Tick};

/// The greatest number of calls.
const CALLS: usize = 4;

/// A token is a time.
type Token = Tick;

/// The protocol, and the bounds that it assumes.
#[derive(Clone, Copy, Debug)]
struct Rules {
    majority: usize,
    /// For this time after a loss of data, a node replies to no request. It is also the `max_ttl` of all clients.
    quarantine: Tick,
    /// A call that takes longer than this fails.
    longest_call: Tick,
    /// How far a token may be ahead of the nodes' clocks: the lead and the difference between the clocks.
    ahead: Tick,
    /// If a token is later than a node's mark by more than this, the node has lost smaller tokens only.
    newest_lost: Tick,
    /// A read makes a majority keep the version that it returns.
    reads_write_back: bool,
    /// A refused write reads the value first.
    refusals_read: bool,
    /// A node that does not keep its copy stores a version only if the request names its mark, or if the token is later
    /// than all tokens that the node can have lost.
    checks_mark: bool,
    /// A node counts for a majority only if it keeps its copy, and not without a copy.
    counts_kept_only: bool,
    /// A node does not keep a copy that it stored before a loss of data.
    checks_copies: bool,
    losses: Losses,
}

/// When a node may lose its data after another one has lost its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Losses {
    /// After a call has succeeded that began when all calls from before the other loss had ended.
    WithCallBetween,
    /// After a call has succeeded that began soon after the other loss, and after a quarantine.
    WithEarlyCall,
    /// After a quarantine.
    Apart,
}

/// The bounds of the model. The checker visits all states within them.
#[derive(Clone, Copy, Debug)]
struct Limits {
    calls: [Option<Kind>; CALLS],
    ticks: Tick,
    /// Losses of data by nodes.
    losses: u8,
    /// Writes that arrive at a node although their call has ended. Further ones are lost.
    late_writes: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    Read,
    Write(Token),
}

#[derive(Clone, Copy, Debug)]
struct FencedValue {
    rules: Rules,
    limits: Limits,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    now: Tick,
    /// Sorted, so that states with exchanged nodes are equal. Each action may change the index of a node.
    nodes: [Node; NODES],
    calls: [Call; CALLS],
    /// The rest of [`Limits::losses`] and [`Limits::late_writes`].
    losses: u8,
    late_writes: u8,
    last_loss: Option<Tick>,
    /// A call has succeeded that allows the next loss.
    may_lose: bool,
    /// The latest version of all calls that have succeeded.
    latest: Version,
    promises_kept: bool,
}

/// The default is the version of a missing value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Version {
    token: Token,
    sequence: u8,
    /// The call.
    writer: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Node {
    /// The time of the mark.
    since: Tick,
    copy: Option<NodeCopy>,
    /// The copy that the last write replaced. A node that restarts with old data has it.
    old_copy: Option<NodeCopy>,
    /// Requests on their way to this node, sorted. They arrive in any order, or never.
    requests: Vec<Request>,
    /// For each call, the reply to its write, or to its read if no write was sent to this node. The call may use the
    /// reply at any time, or never.
    replies: [Option<Reply>; CALLS],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct NodeCopy {
    version: Version,
    /// The time of the mark when the node stored the copy.
    since: Tick,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Request {
    call: usize,
    command: Command,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Command {
    Read,
    Write {
        version: Version,
        /// The mark that the call has read from this node.
        mark: Option<Tick>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Reply {
    since: Tick,
    copy: Option<NodeCopy>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Call {
    NotBegun,
    Running {
        step: Step,
        /// The last time at which the call may succeed.
        until: Tick,
        /// [`State::latest`] when the call began.
        floor: Version,
    },
    Ended,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Step {
    /// Reads the copies, for a read or for a refused write.
    Reading,
    /// Reads the versions, before a write.
    ReadingVersions,
    /// Writes back the version that a read returns.
    WritingBack(Version),
    Writing(Version),
}

/// How a call has succeeded, with the version that a majority keeps then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Success {
    Read(Version),
    Written(Version),
    /// A write after a greater token.
    Refused(Version),
}

/// A step of the model. The first number is that of the node or of the call.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Action {
    Tick,
    /// The node loses its copy, or restarts with the one before it.
    LoseData(usize, Restart),
    Deliver(usize, Request),
    Begin(usize),
    /// Uses the replies that have come so far.
    Continue(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Restart {
    Empty,
    WithOldData,
}

impl Node {
    fn is_quarantined(&self, now: Tick, rules: &Rules) -> bool {
        now < self.since + rules.quarantine
    }

    /// The node's script.
    fn carry_out(&mut self, command: Command, rules: &Rules) -> Reply {
        if let Command::Write { version, mark } = command {
            let own = self.reply(rules);
            let may_store = own.is_kept()
                || mark == Some(self.since)
                || version.token > self.since + rules.newest_lost
                || !rules.checks_mark;
            let is_later = version > own.version() || version == own.version() && !own.is_kept();
            if may_store && is_later {
                self.old_copy = self.copy;
                self.copy = Some(NodeCopy {
                    version,
                    since: self.since,
                });
            }
        }
        self.reply(rules)
    }

    fn reply(&self, rules: &Rules) -> Reply {
        let mut copy = self.copy;
        if let Some(copy) = &mut copy
            && !rules.checks_copies
        {
            copy.since = self.since;
        }
        Reply {
            since: self.since,
            copy,
        }
    }

    fn lose_data(&mut self, restart: Restart, now: Tick) {
        self.since = now;
        self.copy = match restart {
            Restart::Empty => None,
            Restart::WithOldData => self.old_copy,
        };
        self.old_copy = None;
    }

    fn send(&mut self, request: Request) {
        if let Err(at) = self.requests.binary_search(&request) {
            self.requests.insert(at, request);
        }
    }
}

impl Reply {
    fn version(&self) -> Version {
        self.copy.map_or(Version::default(), |copy| copy.version)
    }

    /// Whether the node has kept all its data since it stored the copy.
    fn is_kept(&self) -> bool {
        self.copy.is_some_and(|copy| copy.since == self.since)
    }

    fn keeps(&self, version: Version) -> bool {
        self.is_kept() && self.version() >= version
    }
}

impl Call {
    /// Whether the call waits for the reply to this command.
    fn awaits(&self, command: Command) -> bool {
        let Self::Running { step, .. } = *self else {
            return false;
        };
        match (step, command) {
            (Step::Reading | Step::ReadingVersions, Command::Read) => true,
            (Step::WritingBack(own) | Step::Writing(own), Command::Write { version, .. }) => {
                own == version
            }
            _ => false,
        }
    }
}

impl State {
    fn begin(&mut self, call: usize, kind: Kind, rules: &Rules) {
        let step = match kind {
            Kind::Read => Step::Reading,
            Kind::Write(_) => Step::ReadingVersions,
        };
        self.calls[call] = Call::Running {
            step,
            until: self.now + rules.longest_call,
            floor: self.latest,
        };
        self.read(call);
    }

    fn read(&mut self, call: usize) {
        for node in &mut self.nodes {
            node.replies[call] = None;
            node.send(Request {
                call,
                command: Command::Read,
            });
        }
    }

    /// Writes the version to the nodes that do not keep it. Only the other nodes' replies still count.
    fn write(&mut self, call: usize, version: Version) {
        for node in &mut self.nodes {
            let read = node.replies[call];
            if read.is_some_and(|reply| reply.keeps(version)) {
                continue;
            }
            node.replies[call] = None;
            let mark = read.map(|reply| reply.since);
            node.send(Request {
                call,
                command: Command::Write { version, mark },
            });
        }
    }

    fn set_step(&mut self, call: usize, next: Step) {
        if let Call::Running { step, .. } = &mut self.calls[call] {
            *step = next;
        }
        match next {
            Step::Reading | Step::ReadingVersions => self.read(call),
            Step::WritingBack(version) | Step::Writing(version) => self.write(call, version),
        }
    }

    fn deliver(&mut self, node: usize, request: Request, rules: &Rules) {
        let is_awaited = self.calls[request.call].awaits(request.command);
        if !is_awaited {
            self.late_writes -= 1;
        }
        let node = &mut self.nodes[node];
        node.requests.retain(|other| *other != request);
        let reply = node.carry_out(request.command, rules);
        if is_awaited {
            node.replies[request.call] = Some(reply);
        }
    }

    fn replies(&self, call: usize) -> impl Iterator<Item = Reply> {
        self.nodes.iter().filter_map(move |node| node.replies[call])
    }

    fn keeping(&self, call: usize, version: Version) -> usize {
        let replies = self.replies(call);
        replies.filter(|reply| reply.keeps(version)).count()
    }

    /// Whether no version that a majority keeps can be missing among the replies to a read. With `token`, versions with
    /// smaller tokens may be missing.
    fn has_all(&self, call: usize, token: Option<Token>, rules: &Rules) -> bool {
        let has_lost_nothing = |reply: &Reply| {
            reply.is_kept()
                || token.is_some_and(|token| token > reply.since + rules.newest_lost)
                || !rules.counts_kept_only
        };
        self.replies(call).filter(has_lost_nothing).count() >= rules.majority
            || self.replies(call).count() == NODES
    }

    /// The next step of a call, or its end; `None` if it needs further replies.
    fn next(&self, call: usize, kind: Kind, rules: &Rules) -> Option<Result<Success, Step>> {
        let Call::Running { step, .. } = self.calls[call] else {
            return None;
        };
        let latest = self.replies(call).map(|reply| reply.version()).max();
        let latest = latest.unwrap_or_default();
        let is_kept = |version| self.keeping(call, version) >= rules.majority;
        let end_read = |version: Version| match kind {
            Kind::Write(token) if version.token > token => Some(Success::Refused(version)),
            // The greater token is gone. The library tries again; in the model, the call fails.
            Kind::Write(_) => None,
            Kind::Read => Some(Success::Read(version)),
        };
        let refuse = || {
            if rules.refusals_read {
                Err(Step::Reading)
            } else {
                Ok(Success::Refused(latest))
            }
        };
        match (step, kind) {
            (Step::Reading, _) if !self.has_all(call, None, rules) => None,
            (Step::Reading, _) if latest == Version::default() || !rules.reads_write_back => {
                end_read(latest).map(Ok)
            }
            (Step::Reading, _) if is_kept(latest) => end_read(latest).map(Ok),
            (Step::Reading, _) => Some(Err(Step::WritingBack(latest))),
            (Step::WritingBack(version), _) if is_kept(version) => end_read(version).map(Ok),
            (Step::WritingBack(_), _) => None,
            (Step::ReadingVersions, Kind::Write(token)) => {
                if !self.has_all(call, Some(token), rules) {
                    return None;
                }
                Some(match latest {
                    last if last.token > token => refuse(),
                    last => Err(Step::Writing(Version {
                        token,
                        sequence: if last.token == token {
                            last.sequence + 1
                        } else {
                            0
                        },
                        writer: call,
                    })),
                })
            }
            (Step::Writing(version), Kind::Write(token)) => {
                let accepting = self.replies(call);
                let accepting = accepting
                    .filter(|reply| reply.keeps(version) && reply.version().token == token);
                if accepting.count() >= rules.majority {
                    Some(Ok(Success::Written(version)))
                } else {
                    (latest.token > token).then(refuse)
                }
            }
            (Step::ReadingVersions | Step::Writing(_), Kind::Read) => {
                unreachable!("a read writes no version of its own")
            }
        }
    }

    fn succeed(&mut self, call: usize, success: Success, rules: &Rules) {
        let Call::Running { until, floor, .. } = self.calls[call] else {
            unreachable!("the call runs");
        };
        let (version, is_later) = match success {
            Success::Read(version) => (version, version >= floor),
            Success::Written(version) => (version, version > floor),
            Success::Refused(version) => (version, version.token >= floor.token),
        };
        self.promises_kept &= is_later;
        self.latest = self.latest.max(version);
        self.may_lose |= self.last_loss.is_some_and(|loss| {
            let began = until - rules.longest_call;
            match rules.losses {
                Losses::WithCallBetween => began > loss + rules.longest_call,
                Losses::WithEarlyCall => began > loss,
                Losses::Apart => true,
            }
        });
        self.end(call);
    }

    fn end(&mut self, call: usize) {
        self.calls[call] = Call::Ended;
        for node in &mut self.nodes {
            node.replies[call] = None;
        }
    }

    fn can_lose_data(&self, rules: &Rules) -> bool {
        let Some(last) = self.last_loss else {
            return self.losses > 0;
        };
        let is_after_quarantine = self.now >= last + rules.quarantine;
        self.losses > 0
            && match rules.losses {
                Losses::WithCallBetween => self.may_lose,
                Losses::WithEarlyCall => self.may_lose && is_after_quarantine,
                Losses::Apart => is_after_quarantine,
            }
    }

    fn tick(&mut self) {
        self.now += 1;
        for call in 0..CALLS {
            if matches!(self.calls[call], Call::Running { until, .. } if self.now > until) {
                self.end(call);
            }
        }
    }

    /// Removes differences between states that have no effect later, so that the checker visits fewer states.
    fn simplify(&mut self) {
        for node in &mut self.nodes {
            node.requests.retain(|request| {
                let is_write = matches!(request.command, Command::Write { .. });
                let is_awaited = self.calls[request.call].awaits(request.command);
                is_awaited || is_write && self.late_writes > 0
            });
            if self.losses == 0 {
                node.old_copy = None;
            }
        }
        if self.losses == 0 {
            self.last_loss = None;
            self.may_lose = false;
        }
        self.nodes.sort();
    }
}

impl Model for FencedValue {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let node = Node {
            since: 0,
            copy: None,
            old_copy: None,
            requests: Vec::new(),
            replies: [None; CALLS],
        };
        vec![State {
            now: START,
            nodes: std::array::from_fn(|_| node.clone()),
            calls: [Call::NotBegun; CALLS],
            losses: self.limits.losses,
            late_writes: self.limits.late_writes,
            last_loss: None,
            may_lose: false,
            latest: Version::default(),
            promises_kept: true,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        let Self { rules, limits } = self;
        let has_call = |call: usize| limits.calls[call].is_some();
        if (0..CALLS).all(|call| !has_call(call) || state.calls[call] == Call::Ended) {
            return;
        }
        let has_begun = state.calls.iter().any(|call| *call != Call::NotBegun);
        if has_begun && state.now < START + limits.ticks {
            actions.push(Action::Tick);
        }
        for (index, node) in state.nodes.iter().enumerate() {
            if index > 0 && *node == state.nodes[index - 1] {
                continue;
            }
            if state.can_lose_data(rules) {
                actions.push(Action::LoseData(index, Restart::Empty));
                if node.old_copy.is_some() {
                    actions.push(Action::LoseData(index, Restart::WithOldData));
                }
            }
            if !node.is_quarantined(state.now, rules) {
                let deliver = |request: &Request| Action::Deliver(index, *request);
                actions.extend(node.requests.iter().map(deliver));
            }
        }
        for (call, kind) in limits.calls.iter().enumerate() {
            let Some(kind) = *kind else { continue };
            let is_early = matches!(kind, Kind::Write(token) if token > state.now + rules.ahead);
            // It does not matter which of two reads begins first.
            let is_second = kind == Kind::Read
                && call > 0
                && limits.calls[call - 1] == Some(kind)
                && state.calls[call - 1] == Call::NotBegun;
            if state.calls[call] == Call::NotBegun && !is_early && !is_second {
                actions.push(Action::Begin(call));
            }
            if state.next(call, kind, rules).is_some() {
                actions.push(Action::Continue(call));
            }
        }
    }

    fn next_state(&self, state: &State, action: Action) -> Option<State> {
        let Self { rules, limits } = self;
        let kind = |call: usize| limits.calls[call].expect("there is such a call");
        let mut state = state.clone();
        match action {
            Action::Tick => state.tick(),
            Action::LoseData(node, restart) => {
                state.losses -= 1;
                state.last_loss = Some(state.now);
                state.may_lose = false;
                let now = state.now;
                state.nodes[node].lose_data(restart, now);
            }
            Action::Deliver(node, request) => state.deliver(node, request, rules),
            Action::Begin(call) => state.begin(call, kind(call), rules),
            Action::Continue(call) => match state.next(call, kind(call), rules)? {
                Ok(success) => state.succeed(call, success, rules),
                Err(step) => state.set_step(call, step),
            },
        }
        state.simplify();
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        fn next(model: &FencedValue, state: &State) -> Vec<Result<Success, Step>> {
            let calls = (0..).zip(model.limits.calls);
            let next = |(call, kind): (usize, Option<Kind>)| state.next(call, kind?, &model.rules);
            calls.filter_map(next).collect()
        }
        vec![
            Property::always("versions rise", |_, state: &State| state.promises_kept),
            Property::sometimes("a value is read", |model, state| {
                let reads =
                    |next: &_| matches!(next, Ok(Success::Read(version)) if version.token > 0);
                next(model, state).iter().any(reads)
            }),
            Property::sometimes("a write is accepted", |model, state| {
                let accepts = |next: &_| matches!(next, Ok(Success::Written(_)));
                next(model, state).iter().any(accepts)
            }),
            Property::sometimes("a write is refused", |model, state| {
                let refuses = |next: &_| matches!(next, Ok(Success::Refused(_)));
                next(model, state).iter().any(refuses)
            }),
            Property::sometimes("a read writes back", |model, state| {
                let writes_back = |next: &_| matches!(next, Err(Step::WritingBack(_)));
                next(model, state).iter().any(writes_back)
            }),
            Property::sometimes(
                "a node gets its copy back",
                |model: &Self, state: &State| {
                    let is_back =
                        |node: &Node| node.since > 0 && node.reply(&model.rules).is_kept();
                    state.nodes.iter().any(is_back)
                },
            ),
            Property::sometimes("a node has an old copy", |model: &Self, state: &State| {
                let reply = |node: &Node| node.reply(&model.rules);
                let mut replies = state.nodes.iter().map(reply);
                replies.any(|reply| reply.copy.is_some() && !reply.is_kept())
            }),
            Property::sometimes("a second loss", |model: &Self, state: &State| {
                model.limits.losses == 2 && state.losses == 0
            }),
            Property::sometimes("a late write", |model: &Self, state: &State| {
                state.late_writes < model.limits.late_writes
            }),
            Property::sometimes(
                "a lost copy does not count",
                |model: &Self, state: &State| {
                    // Two replies are enough, although one node has lost its data.
                    let has_lost = |reply: Reply| reply.since > 0 && !reply.is_kept();
                    (0..CALLS).zip(model.limits.calls).any(|(call, kind)| {
                        let is_writing = matches!(
                            kind.and_then(|kind| state.next(call, kind, &model.rules)),
                            Some(Err(Step::Writing(_)))
                        );
                        is_writing
                            && state.replies(call).count() < NODES
                            && state.replies(call).any(has_lost)
                    })
                },
            ),
        ]
    }
}
