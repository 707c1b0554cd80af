//! A model of the lock on a quorum: docs/protocol.md describes the protocol, and this file follows that page rule by
//! rule.
//!
//! The lock is one key on three nodes, and two clients acquire it. Time is counted in ticks. All clocks run at the same
//! rate. The nodes' clocks may step, and these steps also stand for different rates.

mod tests;

use stateright::{Model, Property};

use crate::{Tick, Token};

const NODES: usize = 3;
const CLIENTS: usize = 2;
/// The time at which the model begins. The quarantines of all nodes are over by then.
const START: Tick = 3;
/// A token counts in smaller units than a clock, so that nodes can count up within a tick.
const UNITS_PER_TICK: Token = 8;

/// The protocol, and the bounds that it assumes.
#[derive(Clone, Copy, Debug)]
struct Rules {
    /// The ttl of the lock, which is also the `max_ttl` of all clients.
    ttl: Tick,
    /// The difference between the ttl of a lock and its validity.
    drift: Tick,
    /// Each node's clock is either right or ahead by this offset. It may step from one to the other.
    clock_offset: Tick,
    /// For this time after a loss of data, a node refuses acquires and holds.
    quarantine: Tick,
    /// How far a proposal may be ahead of the highest clock of a node.
    lead: Token,
    majority: usize,
    /// The number of nodes that have to confirm a renewal.
    renewal_majority: usize,
    /// A client writes its token to a majority before it believes its grant.
    writes_back: bool,
    /// A node stores a token only under the lease that holds its key.
    stores_under_lease: bool,
    /// Each attempt to acquire the lock has a lease id of its own.
    new_lease_ids: bool,
    /// A reply counts only for the request that it answers.
    separate_replies: bool,
    /// The validity starts before the first request is sent, not after the replies have come.
    valid_from_request: bool,
}

/// The bounds of the model. The checker visits all states within them.
#[derive(Clone, Copy, Debug)]
struct Limits {
    ticks: Tick,
    /// Attempts of each client to acquire the lock.
    attempts: [u8; CLIENTS],
    /// Renewals of each lease.
    renewals: u8,
    /// Restarts of nodes that lose all data.
    restarts: u8,
    clock_steps: u8,
    /// Requests that arrive although their client has given up or released the lease. Further ones are lost.
    late_requests: u8,
}

#[derive(Clone, Copy, Debug)]
struct Quorum {
    rules: Rules,
    limits: Limits,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    now: Tick,
    /// Sorted, so that states with exchanged nodes are equal. Each action may change the index of a node.
    nodes: [Node; NODES],
    clients: [Client; CLIENTS],
    /// The rest of [`Limits`], up to `late_requests`.
    attempts: [u8; CLIENTS],
    restarts: u8,
    clock_steps: u8,
    late_requests: u8,
    /// The token of the last grant that a client believed.
    last_token: Token,
    tokens_increase: bool,
    grants: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Node {
    clock_offset: Tick,
    key: Option<Key>,
    fence: Token,
    /// The mark beside the fence counter: the time at which the node lost its data, by the node's clock. (In reality,
    /// the first client that connects sets the mark, perhaps later. The model has the earliest time, which is the most
    /// dangerous.)
    data_since: Tick,
    /// Requests on their way to this node, sorted. They arrive in any order, or never.
    requests: Vec<Request>,
    /// For each client, the reply to its current request, if the node has confirmed the request. The client may read
    /// the reply at any time, or never.
    replies: [Option<Token>; CLIENTS],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Key {
    lease: LeaseId,
    /// By the clock of the node.
    expires: Tick,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct LeaseId {
    client: usize,
    attempt: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Request {
    lease: LeaseId,
    command: Command,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Command {
    Acquire {
        proposal: Token,
    },
    /// Writes a token back (round 0), or renews the lease for the nth time.
    Hold {
        token: Token,
        round: u8,
    },
    Release,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Client {
    Idle,
    Acquiring {
        lease: LeaseId,
        valid_until: Tick,
        /// The token that the client is writing back.
        token: Option<Token>,
    },
    Holding {
        lease: LeaseId,
        valid_until: Tick,
        token: Token,
        wrote_back: bool,
        /// The renewals so far, and the end of the validity that a renewal under way will give.
        renewals: u8,
        renewing_until: Option<Tick>,
    },
}

/// The way in which a client got the lock.
#[derive(PartialEq, Eq)]
enum Grant {
    InOneRoundTrip,
    AfterWriteBack,
    Renewed,
}

/// A step of the model. The first number is that of the client or of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Action {
    Tick,
    StepClock(usize),
    LoseData(usize),
    Deliver(usize, Request),
    /// Sends an acquire with this proposal to all nodes.
    Acquire(usize, Token),
    /// Takes the greatest of the replies of these nodes as the token.
    ChooseToken(usize, Vec<usize>),
    /// Reads that a majority has stored the token.
    Believe(usize),
    StartRenewal(usize),
    /// Reads that a majority has renewed the lease.
    EndRenewal(usize),
    /// Releases the lease, or gives up the acquire. The release reaches these nodes at once, and others late or never.
    Release(usize, Vec<usize>),
}

impl Node {
    fn clock(&self, now: Tick) -> Tick {
        now + self.clock_offset
    }

    fn is_quarantined(&self, clock: Tick, rules: &Rules) -> bool {
        clock < self.data_since + rules.quarantine
    }

    /// The node's script: returns the fence counter if the node holds the lease now.
    fn carry_out(&mut self, request: Request, now: Tick, rules: &Rules) -> Option<Token> {
        let (lease, clock) = (request.lease, self.clock(now));
        let holds = self.key.is_some_and(|key| key.lease == lease);
        let is_taken = self.key.is_some() && !holds;
        match request.command {
            Command::Release => {
                self.key = self.key.filter(|_| !holds);
                return None;
            }
            Command::Hold { token, .. } if !rules.stores_under_lease && is_taken => {
                self.fence = self.fence.max(token);
                return Some(self.fence);
            }
            _ if self.is_quarantined(clock, rules) => return None,
            // The lease holds the key already: reply as before.
            Command::Acquire { .. } if holds => return Some(self.fence),
            Command::Acquire { .. } | Command::Hold { .. } if is_taken => return None,
            Command::Acquire { proposal } => {
                let time = clock * UNITS_PER_TICK;
                self.fence = proposal.max(time).max(self.fence + 1);
            }
            Command::Hold { token, .. } => self.fence = self.fence.max(token),
        }
        // This also sets a missing key, and never shortens the ttl.
        let expires = clock + rules.ttl;
        let expires = self.key.map_or(expires, |key| key.expires.max(expires));
        self.key = Some(Key { lease, expires });
        Some(self.fence)
    }

    fn expire(&mut self, now: Tick) {
        let clock = self.clock(now);
        self.key = self.key.filter(|key| key.expires > clock);
    }

    fn lose_data(&mut self, now: Tick) {
        self.key = None;
        self.fence = 0;
        self.data_since = self.clock(now);
    }

    /// The index of a release without effect: the node does not have its lease, and no request for it is on its way.
    fn useless_release(&self) -> Option<usize> {
        let holds = |lease| self.key.is_some_and(|key| key.lease == lease);
        let is_needed = |release: &Request| {
            let mut others = self.requests.iter().filter(|other| *other != release);
            holds(release.lease) || others.any(|other| other.lease == release.lease)
        };
        let is_useless =
            |request: &Request| request.command == Command::Release && !is_needed(request);
        self.requests.iter().position(is_useless)
    }

    fn send(&mut self, request: Request) {
        if let Err(at) = self.requests.binary_search(&request) {
            self.requests.insert(at, request);
        }
    }
}

impl Client {
    fn lease(&self) -> Option<LeaseId> {
        match *self {
            Self::Idle => None,
            Self::Acquiring { lease, .. } | Self::Holding { lease, .. } => Some(lease),
        }
    }

    fn grant(&self) -> Option<Grant> {
        match *self {
            Self::Idle | Self::Acquiring { .. } => None,
            Self::Holding {
                renewals: 1,
                renewing_until: None,
                ..
            } => Some(Grant::Renewed),
            Self::Holding {
                wrote_back: true, ..
            } => Some(Grant::AfterWriteBack),
            Self::Holding { .. } => Some(Grant::InOneRoundTrip),
        }
    }

    /// Whether the client waits for replies to this request.
    fn awaits(&self, request: Request, rules: &Rules) -> bool {
        let round = match request.command {
            Command::Acquire { .. } => 0,
            Command::Hold { round, .. } => round,
            Command::Release => return false,
        };
        let awaited = match *self {
            Self::Idle => None,
            Self::Acquiring { lease, .. } => Some((lease, 0)),
            Self::Holding {
                lease,
                renewals,
                renewing_until,
                ..
            } => {
                let is_renewing = renewing_until.is_some();
                (is_renewing || !rules.separate_replies).then_some((lease, renewals))
            }
        };
        awaited == Some((request.lease, round))
    }
}

impl State {
    fn send_to_all(&mut self, lease: LeaseId, command: Command) {
        for node in &mut self.nodes {
            node.send(Request { lease, command });
        }
    }

    fn deliver(&mut self, node: usize, request: Request, rules: &Rules) {
        let client = request.lease.client;
        if self.is_late(request) {
            self.late_requests -= 1;
        }
        let node = &mut self.nodes[node];
        node.requests.retain(|other| *other != request);
        let reply = node.carry_out(request, self.now, rules);
        if self.clients[client].awaits(request, rules) && reply.is_some() {
            node.replies[client] = reply;
        }
    }

    /// Changes the client's state. Drops the replies that it has not read.
    fn set_client(&mut self, client: usize, state: Client) {
        self.clients[client] = state;
        for node in &mut self.nodes {
            node.replies[client] = None;
        }
    }

    fn is_late(&self, request: Request) -> bool {
        self.clients[request.lease.client].lease() != Some(request.lease)
    }

    /// The nodes from which the client has a reply.
    fn replied(&self, client: usize) -> Vec<usize> {
        let nodes = 0..NODES;
        nodes
            .filter(|&node| self.nodes[node].replies[client].is_some())
            .collect()
    }

    /// How many nodes have stored the token, or a greater one, under the client's lease.
    fn stored(&self, client: usize, token: Token) -> usize {
        let stored = |node: &&Node| node.replies[client] >= Some(token);
        self.nodes.iter().filter(stored).count()
    }

    /// Makes the client rely on its lease from now on.
    fn believe(&mut self, client: usize, token: Token, rules: &Rules) {
        let Client::Acquiring {
            lease,
            valid_until,
            token: written,
        } = self.clients[client]
        else {
            unreachable!("the client acquires");
        };
        self.tokens_increase &= token > self.last_token;
        self.last_token = token;
        self.grants += 1;
        let from_now = self.now + rules.ttl - rules.drift;
        let holding = Client::Holding {
            lease,
            valid_until: if rules.valid_from_request {
                valid_until
            } else {
                from_now
            },
            token,
            wrote_back: written.is_some(),
            renewals: 0,
            renewing_until: None,
        };
        self.set_client(client, holding);
    }

    fn release(&mut self, client: usize, reached: &[usize]) {
        let lease = self.clients[client].lease().expect("the client has one");
        let command = Command::Release;
        for (index, node) in self.nodes.iter_mut().enumerate() {
            let release = Request { lease, command };
            if reached.contains(&index) {
                node.key = node.key.filter(|key| key.lease != lease);
            } else {
                node.send(release);
            }
        }
        self.set_client(client, Client::Idle);
    }

    /// Begins to acquire the lock.
    fn acquire(&mut self, client: usize, proposal: Token, rules: &Rules) {
        let attempt = if rules.new_lease_ids {
            self.attempts[client]
        } else {
            0
        };
        self.attempts[client] -= 1;
        let lease = LeaseId { client, attempt };
        let acquiring = Client::Acquiring {
            lease,
            valid_until: self.now + rules.ttl - rules.drift,
            token: None,
        };
        self.set_client(client, acquiring);
        self.send_to_all(lease, Command::Acquire { proposal });
    }

    fn tick(&mut self, rules: &Rules) {
        self.now += 1;
        for node in &mut self.nodes {
            node.expire(self.now);
        }
        for client in 0..CLIENTS {
            match self.clients[client] {
                Client::Acquiring { valid_until, .. }
                    if rules.valid_from_request && self.now >= valid_until =>
                {
                    self.release(client, &[]);
                }
                Client::Holding { valid_until, .. } if self.now >= valid_until => {
                    self.set_client(client, Client::Idle);
                }
                _ => {}
            }
        }
    }

    /// Removes differences between states that have no effect later, so that the checker visits fewer states.
    fn simplify(&mut self) {
        let leases = self.clients.each_ref().map(Client::lease);
        let is_late = |request: &Request| leases[request.lease.client] != Some(request.lease);
        for node in &mut self.nodes {
            if self.late_requests == 0 {
                node.requests.retain(|request| !is_late(request));
            }
            while let Some(index) = node.useless_release() {
                node.requests.remove(index);
            }
            // The node's clock is already above this counter, so the counter has no effect on later tokens.
            if node.key.is_none() && node.fence < self.now * UNITS_PER_TICK {
                node.fence = 0;
            }
        }
        self.nodes.sort();
    }
}

impl Model for Quorum {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let node = |clock_offset| Node {
            clock_offset,
            key: None,
            fence: 0,
            data_since: 0,
            requests: Vec::new(),
            replies: [None; CLIENTS],
        };
        let offset = |is_ahead| if is_ahead { self.rules.clock_offset } else { 0 };
        let nodes = |ahead| {
            let mut nodes: [Node; NODES] =
                std::array::from_fn(|index| node(offset(index >= NODES - ahead)));
            nodes.sort();
            nodes
        };
        let state = |ahead| State {
            now: START,
            nodes: nodes(ahead),
            clients: [Client::Idle, Client::Idle],
            attempts: self.limits.attempts,
            restarts: self.limits.restarts,
            clock_steps: self.limits.clock_steps,
            late_requests: self.limits.late_requests,
            last_token: 0,
            tokens_increase: true,
            grants: 0,
        };
        (0..=NODES).map(state).collect()
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        let acquires = |client: &Client| matches!(client, Client::Acquiring { .. });
        if state.attempts == [0; CLIENTS] && !state.clients.iter().any(acquires) {
            // No further grant is possible.
            return;
        }
        // Before the first attempt, there is no lease to lose.
        let has_begun = state.attempts != self.limits.attempts;
        if has_begun && state.now < START + self.limits.ticks {
            actions.push(Action::Tick);
        }
        for (index, node) in state.nodes.iter().enumerate() {
            if index > 0 && *node == state.nodes[index - 1] {
                continue;
            }
            if has_begun && state.clock_steps > 0 {
                actions.push(Action::StepClock(index));
            }
            if has_begun && state.restarts > 0 {
                actions.push(Action::LoseData(index));
            }
            let deliver = |request: &Request| Action::Deliver(index, *request);
            actions.extend(node.requests.iter().map(deliver));
        }
        for client in 0..CLIENTS {
            self.actions_of(client, state, actions);
        }
    }

    fn next_state(&self, state: &State, action: Action) -> Option<State> {
        let Self { rules, .. } = self;
        let mut state = state.clone();
        match action {
            Action::Tick => state.tick(rules),
            Action::StepClock(node) => {
                state.clock_steps -= 1;
                let node = &mut state.nodes[node];
                node.clock_offset = rules.clock_offset - node.clock_offset;
                node.expire(state.now);
            }
            Action::LoseData(node) => {
                state.restarts -= 1;
                state.nodes[node].lose_data(state.now);
            }
            Action::Deliver(node, request) => state.deliver(node, request, rules),
            Action::Acquire(client, proposal) => state.acquire(client, proposal, rules),
            Action::ChooseToken(client, nodes) => {
                let replies = nodes.iter().map(|&node| state.nodes[node].replies[client]);
                let greatest = replies.max().flatten().expect("the nodes have replied");
                if state.stored(client, greatest) >= rules.majority || !rules.writes_back {
                    state.believe(client, greatest, rules);
                } else if let Client::Acquiring { lease, token, .. } = &mut state.clients[client] {
                    *token = Some(greatest);
                    let (lease, token) = (*lease, greatest);
                    state.send_to_all(lease, Command::Hold { token, round: 0 });
                }
            }
            Action::Believe(client) => {
                if let Client::Acquiring {
                    token: Some(token), ..
                } = state.clients[client]
                {
                    state.believe(client, token, rules);
                }
            }
            Action::StartRenewal(client) => {
                let mut renewing = state.clients[client].clone();
                if let Client::Holding {
                    lease,
                    token,
                    renewals,
                    renewing_until,
                    ..
                } = &mut renewing
                {
                    *renewals += 1;
                    *renewing_until = Some(state.now + rules.ttl - rules.drift);
                    let (lease, token, round) = (*lease, *token, *renewals);
                    state.send_to_all(lease, Command::Hold { token, round });
                }
                if rules.separate_replies {
                    state.set_client(client, renewing);
                } else {
                    state.clients[client] = renewing;
                }
            }
            Action::EndRenewal(client) => {
                let mut renewed = state.clients[client].clone();
                if let Client::Holding {
                    valid_until,
                    renewing_until,
                    ..
                } = &mut renewed
                {
                    *valid_until = renewing_until.take().expect("a renewal is under way");
                }
                state.set_client(client, renewed);
            }
            Action::Release(client, reached) => state.release(client, &reached),
        }
        state.simplify();
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        fn any(state: &State, is_so: impl Fn(&Client) -> bool) -> bool {
            state.clients.iter().any(is_so)
        }
        vec![
            // A client whose lease has ended is idle.
            Property::always("no two valid leases overlap", |_, state: &State| {
                any(state, |client| client.grant().is_none())
            }),
            Property::always("tokens increase", |_, state: &State| state.tokens_increase),
            Property::sometimes("grant in one round trip", |_, state: &State| {
                any(state, |client| {
                    client.grant() == Some(Grant::InOneRoundTrip)
                })
            }),
            Property::sometimes("grant after a write-back", |_, state: &State| {
                any(state, |client| {
                    client.grant() == Some(Grant::AfterWriteBack)
                })
            }),
            Property::sometimes("renewal", |_, state: &State| {
                any(state, |client| client.grant() == Some(Grant::Renewed))
            }),
            Property::sometimes("second grant", |_, state: &State| state.grants == 2),
            Property::sometimes("vote after a quarantine", |_, state: &State| {
                let votes = |node: &Node| node.data_since > 0 && node.key.is_some();
                state.nodes.iter().any(votes)
            }),
        ]
    }
}

impl Quorum {
    fn actions_of(&self, client: usize, state: &State, actions: &mut Vec<Action>) {
        let Rules {
            majority,
            renewal_majority,
            ..
        } = self.rules;
        let replied = state.replied(client);
        match state.clients[client] {
            Client::Idle => {
                let highest = state.nodes.iter().map(|node| node.clock(state.now)).max();
                let highest = highest.expect("there are nodes") * UNITS_PER_TICK;
                // Two proposals are enough: the highest, and one below the time of each node. The nodes raise the lower
                // proposal to their own times.
                let mut proposals = vec![state.now * UNITS_PER_TICK, highest + self.rules.lead];
                proposals.dedup();
                // If both clients are in the same state, it does not matter which of them begins, so only one does.
                let attempts = self.limits.attempts;
                let is_second = client > 0 && attempts == [attempts[0]; CLIENTS];
                let may_begin = !is_second || state.attempts != attempts;
                if state.attempts[client] > 0 && may_begin {
                    for proposal in proposals {
                        actions.push(Action::Acquire(client, proposal));
                    }
                }
                return;
            }
            Client::Acquiring { token: None, .. } => {
                let majorities = subsets(&replied).filter(|nodes| nodes.len() == majority);
                actions.extend(majorities.map(|nodes| Action::ChooseToken(client, nodes)));
            }
            Client::Acquiring {
                token: Some(token), ..
            } => {
                if state.stored(client, token) >= majority {
                    actions.push(Action::Believe(client));
                }
            }
            Client::Holding {
                renewing_until: Some(_),
                ..
            } => {
                if replied.len() >= renewal_majority {
                    actions.push(Action::EndRenewal(client));
                }
            }
            Client::Holding { renewals, .. } => {
                if renewals < self.limits.renewals {
                    actions.push(Action::StartRenewal(client));
                }
            }
        }
        let lease = state.clients[client].lease();
        let holds = |node: &usize| state.nodes[*node].key.map(|key| key.lease) == lease;
        let holding: Vec<usize> = (0..NODES).filter(holds).collect();
        actions.extend(subsets(&holding).map(|reached| Action::Release(client, reached)));
    }
}

fn subsets(of: &[usize]) -> impl Iterator<Item = Vec<usize>> {
    (0..1_usize << of.len()).map(|bits| {
        let members = of.iter().enumerate();
        let members = members.filter(|(index, _)| bits >> index & 1 == 1);
        members.map(|(_, member)| *member).collect()
    })
}
