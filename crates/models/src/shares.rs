//! A model of a key that several leases share: the scripts of `lua/`, and three clients that acquire, renew, convert and
//! release leases of the key, alone or with others. `docs/shared_locks.md` has the promises.
//!
//! - Redis carries out one request at a time, so a request is one step.
//! - Requests, replies and notifications may come late, in any order, or never.
//! - Time is counted in ticks. A client acts on a time-out before the next tick.
//! - The clocks of all machines run at the same rate. A slot of a Cluster may move to a server whose clock is ahead.

mod tests;

use stateright::{Model, Property};

use crate::{Tick, Token};

const CLIENTS: usize = 3;
/// The time at which a model begins. It is not zero, so that earlier times can be written, too.
const START: Tick = 8;
/// A shared key outlives its latest share by this time.
const GRACE: Tick = 1;

/// How a lease holds the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Alone,
    /// Together with other readers.
    Reader,
    /// This number of permits. All permits together are within the limit.
    Permits(u8),
}

/// The rules of the protocol. A test can switch a `bool` off, as a defect of the code would.
#[derive(Clone, Copy, Debug)]
struct Rules {
    modes: [Mode; CLIENTS],
    limit: u8,
    ttl: Tick,
    /// The minimum time for which permits stay taken after their grant.
    min_hold: Tick,
    /// A waiter that joined longer ago than this has to confirm its grant, within `confirm` ticks.
    fresh: Tick,
    confirm: Tick,
    /// The longest time until a waiter asks again.
    poll: Tick,
    /// The longest time for which the first waiter may sleep although it fits.
    longest_sleep: Tick,
    /// The clock of the second server is ahead by this time.
    ahead: Tick,
    /// The clock of the first client is ahead by this time.
    client_ahead: Tick,
    /// Shares that have ended do not count.
    purges: bool,
    /// The clock of Redis decides whether a share has ended, not that of the client that asks.
    purges_by_own_clock: bool,
    /// A renewal changes only its own share.
    renews_only_its_own: bool,
    /// A waiter that does not fit keeps those behind it out.
    serves_in_order: bool,
    /// A request that finds others in the queue joins behind them.
    joins_behind_others: bool,
    serves_after_release: bool,
    serves_after_leave: bool,
    /// After a release, Redis asks the first waiter for a request if the waiter does not fit yet, but may soon: it may
    /// have waited for the end of the released share.
    hints_after_release: bool,
    /// A release does not end permits before `min_hold` is over.
    keeps_min_hold: bool,
    /// After a move to another server, a script moves the ends of shares by the difference of the clocks.
    shifts_ends: bool,
    /// The grant of a share increases the token.
    counts_shares: bool,
    /// A reader becomes the writer only if it is the only reader.
    upgrades_only_alone: bool,
    /// A conversion needs the lease that it converts.
    converts_holders_only: bool,
    /// A conversion gives a new token.
    counts_conversions: bool,
    serves_after_downgrade: bool,
    /// Each attempt to acquire has a lease id of its own.
    new_lease_ids: bool,
    /// The validity of a lease begins before its request is sent, not when the reply comes.
    valid_from_request: bool,
}

/// The bounds of a model. The checker visits all states within them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Limits {
    ticks: Tick,
    /// The attempts of each client to acquire the key.
    attempts: [u8; CLIENTS],
    /// The renewals of all leases together.
    renewals: u8,
    /// The conversions of all leases together.
    conversions: u8,
    crashes: u8,
    /// The number of requests, replies and notifications that are lost.
    losses: u8,
    /// The number of calls that end without a grant, at their deadline or without a reply.
    ends: u8,
    moves: u8,
}

#[derive(Clone, Copy, Debug)]
struct Shares {
    rules: Rules,
    limits: Limits,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    now: Tick,
    /// The limits less the steps that were taken. `ticks` stays.
    limits: Limits,
    /// The clock of the key's server is ahead by this time.
    ahead: Tick,
    key: Key,
    queue: Vec<Waiter>,
    counter: Token,
    /// The requests on their way to Redis, sorted.
    requests: Vec<Request>,
    replies: [Option<Reply>; CLIENTS],
    /// The notifications on their way to clients, sorted.
    notifications: Vec<Notification>,
    clients: [Client; CLIENTS],
    /// The leases whose calls have ended without a grant. Redis may still grant them.
    abandoned: Vec<LeaseId>,
    seen: Seen,
}

/// The observations of an observer that sees all machines. The promises are about them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Seen {
    last_token: Token,
    tokens_increase: bool,
    in_order: bool,
    /// False once a release, or an acquire that had to wait, has left a first waiter in the queue although it fitted.
    is_served: bool,
    /// The number of ticks for which the first waiter has slept although it fits.
    asleep: Tick,
    /// The times of the grants that clients have used, if `min_hold` counts them.
    starts: Vec<Tick>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Key {
    Free,
    /// `ends` is in real time, since Redis moves the ttl with a key.
    Alone {
        lease: LeaseId,
        token: Token,
        ends: Tick,
    },
    /// The key itself expires at `till`, in real time.
    Shared {
        shares: Vec<Share>,
        till: Tick,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Share {
    lease: LeaseId,
    /// The end, by the clock of the server that wrote it.
    ends: Tick,
    /// The real time of the last grant or renewal of this share.
    asked: Tick,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct LeaseId {
    client: usize,
    attempt: u8,
    /// Whether a conversion has made this lease: a writer of a reader, or the other way round.
    is_converted: bool,
}

impl LeaseId {
    /// The lease that a conversion makes of this one.
    fn converted(self) -> Self {
        let is_converted = true;
        Self {
            is_converted,
            ..self
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Waiter {
    lease: LeaseId,
    joined: Tick,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Request {
    lease: LeaseId,
    command: Command,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Command {
    /// Acquires the key, or joins the queue at its end or at its start.
    Join {
        is_late: bool,
    },
    /// Confirms a grant, or asks for the place in the queue.
    Ask,
    Renew,
    /// Moves the grant to the lease [`LeaseId::converted`].
    Convert,
    /// Ends the lease, which may be queued. `granted` is the time of a grant that was used.
    Release {
        granted: Option<Tick>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Reply {
    Granted {
        token: Token,
        at: Tick,
    },
    /// The lease waits, and may fit at this time.
    Queued {
        until: Tick,
    },
    /// The lease is neither queued nor granted.
    Missing,
    Renewed,
    /// Other readers hold the key, too.
    NotConverted,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Notification {
    Granted {
        lease: LeaseId,
        token: Token,
        at: Tick,
        has_to_confirm: bool,
    },
    /// Asks the waiter to send a request.
    Hint { lease: LeaseId },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Client {
    Idle,
    /// The client waits for the reply to the request of `since`. It sent the first request for the lease at `first`.
    Asking {
        lease: LeaseId,
        first: Tick,
        since: Tick,
    },
    /// The client sleeps until `ask_at`, or until a notification comes.
    Waiting {
        lease: LeaseId,
        first: Tick,
        ask_at: Tick,
    },
    Holding {
        lease: LeaseId,
        granted: Tick,
        valid_until: Tick,
        renewing: Option<Tick>,
    },
    /// The client waits for the reply to the conversion of `since`. Until then, it only reads.
    Converting {
        lease: LeaseId,
        granted: Tick,
        valid_until: Tick,
        since: Tick,
    },
    Crashed,
}

/// A step of the model. A number is the number of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Action {
    Tick,
    Move,
    Acquire(usize),
    /// A sleeping waiter reaches its `ask_at`.
    Ask(usize),
    /// The call returns without a grant.
    EndCall(usize),
    Renew(usize),
    Convert(usize),
    Release(usize),
    Crash(usize),
    Deliver(Request),
    LoseRequest(Request),
    Read(usize),
    /// The request arrives, and its reply is lost.
    DeliverUnanswered(Request),
    Notify(Notification),
    LoseNotification(Notification),
}

impl Notification {
    fn lease(&self) -> LeaseId {
        match *self {
            Self::Granted { lease, .. } | Self::Hint { lease } => lease,
        }
    }
}

impl Client {
    fn lease(&self) -> Option<LeaseId> {
        match *self {
            Self::Idle | Self::Crashed => None,
            Self::Asking { lease, .. }
            | Self::Waiting { lease, .. }
            | Self::Holding { lease, .. }
            | Self::Converting { lease, .. } => Some(lease),
        }
    }

    /// Whether the client still wants to be granted the lease.
    fn wants(&self, wanted: LeaseId) -> bool {
        matches!(*self, Self::Asking { lease, .. } | Self::Waiting { lease, .. } if lease == wanted)
    }
}

impl Rules {
    fn mode(&self, lease: LeaseId) -> Mode {
        match (self.modes[lease.client], lease.is_converted) {
            (Mode::Alone, true) => Mode::Reader,
            (Mode::Reader, true) => Mode::Alone,
            (mode, _) => mode,
        }
    }

    fn weight(&self, lease: LeaseId) -> u8 {
        match self.mode(lease) {
            Mode::Permits(weight) => weight,
            Mode::Alone | Mode::Reader => 1,
        }
    }

    /// Whether all these leases may hold the key together.
    fn admits(&self, leases: &[LeaseId]) -> bool {
        let is_alone = |lease: &LeaseId| self.mode(*lease) == Mode::Alone;
        let is_reader = |lease: &LeaseId| self.mode(*lease) == Mode::Reader;
        if leases.len() < 2 || leases.iter().all(is_reader) {
            return true;
        }
        let weights = leases.iter().map(|lease| self.weight(*lease));
        !leases.iter().any(is_alone) && weights.sum::<u8>() <= self.limit
    }

    /// The ttl of a new grant.
    fn first_ttl(&self, lease: LeaseId) -> Tick {
        match self.mode(lease) {
            Mode::Permits(_) => self.ttl.max(self.min_hold),
            Mode::Alone | Mode::Reader => self.ttl,
        }
    }
}

/// Redis: the scripts.
impl State {
    fn clock(&self) -> Tick {
        self.now + self.ahead
    }

    fn send(&mut self, lease: LeaseId, command: Command) {
        let request = Request { lease, command };
        if let Err(at) = self.requests.binary_search(&request) {
            self.requests.insert(at, request);
        }
    }

    fn publish(&mut self, notification: Notification) {
        let listens = self.clients[notification.lease().client] != Client::Crashed;
        if let (true, Err(at)) = (listens, self.notifications.binary_search(&notification)) {
            self.notifications.insert(at, notification);
        }
    }

    /// The time by which the script has to move the ends of shares.
    fn shift(&self, rules: &Rules) -> i16 {
        let Key::Shared { shares, till } = &self.key else {
            return 0;
        };
        let latest = shares
            .iter()
            .map(|share| share.ends)
            .max()
            .unwrap_or_default();
        let moved = i16::from(*till) + i16::from(self.ahead) - i16::from(GRACE) - i16::from(latest);
        if rules.shifts_ends { moved } else { 0 }
    }

    /// The part shares.lua. Removes shares that have ended by this clock.
    fn look(&mut self, clock: Tick, rules: &Rules) {
        let shift = self.shift(rules);
        match &mut self.key {
            Key::Free => return,
            Key::Alone { ends, .. } if *ends > self.now => return,
            Key::Shared { shares, till } if *till > self.now => {
                for share in shares.iter_mut() {
                    share.ends = (i16::from(share.ends) + shift)
                        .try_into()
                        .expect("a small time");
                }
                if rules.purges {
                    shares.retain(|share| share.ends > clock);
                }
                if !shares.is_empty() {
                    return;
                }
            }
            Key::Alone { .. } | Key::Shared { .. } => {}
        }
        self.key = Key::Free;
    }

    /// The leases that hold the key according to Redis.
    fn holders(&self) -> Vec<LeaseId> {
        match &self.key {
            Key::Free => Vec::new(),
            Key::Alone { lease, .. } => vec![*lease],
            Key::Shared { shares, .. } => shares.iter().map(|share| share.lease).collect(),
        }
    }

    fn fits(&self, lease: LeaseId, rules: &Rules) -> bool {
        let mut all = self.holders();
        all.push(lease);
        rules.admits(&all)
    }

    /// The number of ticks for which the holders keep the lease out, unless they are renewed.
    fn wait_for(&self, lease: LeaseId, rules: &Rules) -> Tick {
        let mut ends: Vec<(i16, LeaseId)> = match &self.key {
            Key::Free => Vec::new(),
            Key::Alone { lease, ends, .. } => vec![(i16::from(*ends), *lease)],
            Key::Shared { shares, .. } => {
                let end =
                    |share: &Share| (i16::from(share.ends) - i16::from(self.ahead), share.lease);
                shares.iter().map(end).collect()
            }
        };
        ends.sort_unstable();
        let mut last = i16::from(self.now);
        while let Some((end, _)) = ends.first().copied() {
            let mut all: Vec<LeaseId> = ends.iter().map(|(_, lease)| *lease).collect();
            all.push(lease);
            if rules.admits(&all) {
                break;
            }
            last = end;
            ends.remove(0);
        }
        // A lease that fits already waits for the waiters before it, which a release serves.
        let latest = ends.last().map_or(last, |(end, _)| *end);
        let wait = if last > i16::from(self.now) {
            last
        } else {
            latest
        } - i16::from(self.now);
        wait.max(1).try_into().expect("a small time")
    }

    fn grant(&mut self, lease: LeaseId, ttl: Tick, rules: &Rules) -> Token {
        let is_alone = rules.mode(lease) == Mode::Alone;
        let token = self.counter + 1;
        if is_alone || rules.counts_shares {
            self.counter = token;
        }
        self.seen.tokens_increase &= token > self.seen.last_token;
        self.seen.last_token = token;
        if !self.holders().contains(&lease) {
            let before = self.queue.iter().map(|waiter| waiter.lease);
            let mut before = before.take_while(|before| *before != lease);
            let is_wanted = |lease: LeaseId| self.clients[lease.client].wants(lease);
            self.seen.in_order &= !before.any(is_wanted);
        }
        if is_alone {
            let ends = self.now + ttl;
            self.key = Key::Alone { lease, token, ends };
        } else {
            self.give(lease, ttl);
        }
        token
    }

    /// Sets the end of a share to at least `ttl` from now.
    fn give(&mut self, lease: LeaseId, ttl: Tick) {
        let (now, clock) = (self.now, self.clock());
        let given = Share {
            lease,
            ends: clock + ttl,
            asked: now,
        };
        if !matches!(self.key, Key::Shared { .. }) {
            self.key = Key::Shared {
                shares: Vec::new(),
                till: 0,
            };
        }
        let Key::Shared { shares, .. } = &mut self.key else {
            unreachable!("it was set above");
        };
        match shares.iter_mut().find(|share| share.lease == lease) {
            Some(share) => {
                *share = Share {
                    ends: share.ends.max(given.ends),
                    ..given
                }
            }
            None => shares.push(given),
        }
        self.set_till();
    }

    /// The key outlives its latest share by the grace.
    fn set_till(&mut self) {
        if let Key::Shared { shares, till } = &mut self.key {
            let latest = shares.iter().map(|share| share.ends).max();
            *till = latest.map_or(0, |latest| latest + GRACE - self.ahead);
        }
    }

    /// The part serve.lua. Grants the key to waiters, in the order of the queue, as long as they fit.
    fn serve(&mut self, is_release: bool, rules: &Rules) {
        let mut place = 0;
        let mut has_changed = is_release && rules.hints_after_release;
        while let Some(waiter) = self.queue.get(place).copied() {
            let Waiter { lease, joined } = waiter;
            if self.clients[lease.client] == Client::Crashed {
                self.queue.remove(place);
                has_changed = true;
            } else if self.fits(lease, rules) {
                let has_to_confirm = self.now > joined + rules.fresh;
                let ttl = if has_to_confirm {
                    rules.confirm
                } else {
                    rules.first_ttl(lease)
                };
                let token = self.grant(lease, ttl, rules);
                self.queue.remove(place);
                self.publish(Notification::Granted {
                    lease,
                    token,
                    at: self.now,
                    has_to_confirm,
                });
                has_changed = true;
            } else if rules.serves_in_order {
                // The new first waiter may fit before its next request.
                if has_changed && self.wait_for(lease, rules) <= rules.poll {
                    self.publish(Notification::Hint { lease });
                }
                return;
            } else {
                place += 1;
            }
        }
    }

    fn carry_out(&mut self, request: Request, rules: &Rules) -> Option<Reply> {
        let Request { lease, command } = request;
        let clock = if rules.purges_by_own_clock {
            self.clock()
        } else if lease.client == 0 {
            self.now + rules.client_ahead
        } else {
            self.now
        };
        self.look(clock, rules);
        let before = (self.holders(), self.queue.clone());
        let reply = self.run(lease, command, rules);
        let is_release = matches!(command, Command::Release { .. });
        let is_downgrade = command == Command::Convert && rules.mode(lease) == Mode::Alone;
        let has_changed = before != (self.holders(), self.queue.clone());
        if (is_release || is_downgrade) && has_changed
            || matches!(reply, Some(Reply::Queued { .. }))
        {
            self.seen.is_served &= !self.has_room_for_first(rules);
        }
        reply
    }

    fn run(&mut self, lease: LeaseId, command: Command, rules: &Rules) -> Option<Reply> {
        match command {
            Command::Join { is_late } => Some(self.acquire(lease, Some(is_late), rules)),
            Command::Ask => Some(self.acquire(lease, None, rules)),
            Command::Renew => Some(self.renew(lease, rules)),
            Command::Convert => Some(self.convert(lease, rules)),
            Command::Release { granted } => {
                self.release(lease, granted, rules);
                None
            }
        }
    }

    /// acquire.lua and join.lua. With `joins`, a lease that does not fit joins the queue: at its start if `joins` is
    /// true, because the waiter confirmed an earlier grant too late; otherwise at its end.
    fn acquire(&mut self, lease: LeaseId, joins: Option<bool>, rules: &Rules) -> Reply {
        let at = self.now;
        if self.holders().contains(&lease) {
            let ttl = rules.first_ttl(lease);
            let token = match &mut self.key {
                Key::Alone { token, ends, .. } => {
                    *ends = at + ttl;
                    *token
                }
                // A confirmed share gets a new token.
                _ => self.grant(lease, ttl, rules),
            };
            return Reply::Granted { token, at };
        }
        let is_queued = self.queue.iter().any(|waiter| waiter.lease == lease);
        match joins {
            Some(_)
                if (self.queue.is_empty() || !rules.joins_behind_others)
                    && self.fits(lease, rules) =>
            {
                let token = self.grant(lease, rules.first_ttl(lease), rules);
                return Reply::Granted { token, at };
            }
            Some(is_late) if !is_queued => {
                let place = if is_late { 0 } else { self.queue.len() };
                self.queue.insert(place, Waiter { lease, joined: at });
            }
            None if !is_queued => return Reply::Missing,
            _ => {}
        }
        self.serve(false, rules);
        if self.holders().contains(&lease) {
            // The caller gets the reply of the script, and no notification.
            self.notifications.retain(|sent| sent.lease() != lease);
            let ttl = rules.first_ttl(lease);
            if let Key::Shared { .. } = self.key {
                self.give(lease, ttl);
            } else if let Key::Alone { ends, .. } = &mut self.key {
                *ends = at + ttl;
            }
            let token = self.seen.last_token;
            return Reply::Granted { token, at };
        }
        Reply::Queued {
            until: at + self.wait_for(lease, rules),
        }
    }

    /// renew.lua
    fn renew(&mut self, lease: LeaseId, rules: &Rules) -> Reply {
        if !self.holders().contains(&lease) {
            return Reply::Missing;
        }
        if let Key::Alone { ends, .. } = &mut self.key {
            *ends = self.now + rules.ttl;
            return Reply::Renewed;
        }
        let clock = self.clock();
        if let (Key::Shared { shares, .. }, false) = (&mut self.key, rules.renews_only_its_own) {
            for share in shares {
                share.ends = share.ends.max(clock + rules.ttl);
            }
        }
        self.give(lease, rules.ttl);
        Reply::Renewed
    }

    /// convert.lua
    fn convert(&mut self, from: LeaseId, rules: &Rules) -> Reply {
        let (at, to) = (self.now, from.converted());
        let holders = self.holders();
        if !holders.contains(&from) && rules.converts_holders_only {
            return Reply::Missing;
        }
        let is_upgrade = rules.mode(to) == Mode::Alone;
        if is_upgrade && holders.len() > 1 && rules.upgrades_only_alone {
            return Reply::NotConverted;
        }
        // Renewals have the same ttl, so the full ttl is never shorter than the rest.
        let token = self.counter + Token::from(rules.counts_conversions);
        self.counter = token;
        self.seen.tokens_increase &= token > self.seen.last_token;
        self.seen.last_token = token;
        self.key = Key::Free;
        if is_upgrade {
            let (lease, ends) = (to, at + rules.ttl);
            self.key = Key::Alone { lease, token, ends };
        } else {
            self.give(to, rules.ttl);
            if rules.serves_after_downgrade {
                self.serve(true, rules);
            }
        }
        Reply::Granted { token, at }
    }

    /// release.lua and release_share.lua
    fn release(&mut self, lease: LeaseId, granted: Option<Tick>, rules: &Rules) {
        let (now, ahead) = (self.now, self.ahead);
        let queued = self.queue.len();
        self.queue.retain(|waiter| waiter.lease != lease);
        let mut serves = self.queue.len() < queued && rules.serves_after_leave;
        match &mut self.key {
            Key::Alone { lease: holder, .. } if *holder == lease => {
                self.key = Key::Free;
                serves = rules.serves_after_release;
            }
            Key::Shared { shares, .. } => {
                let rests = |granted: &Tick| granted + rules.min_hold > now && rules.keeps_min_hold;
                let rests_until = granted
                    .filter(rests)
                    .map(|granted| granted + rules.min_hold);
                match (
                    shares.iter_mut().find(|share| share.lease == lease),
                    rests_until,
                ) {
                    (Some(share), Some(until)) => share.ends = until + ahead,
                    (Some(_), None) => {
                        shares.retain(|share| share.lease != lease);
                        serves = rules.serves_after_release;
                    }
                    (None, _) => {}
                }
                if shares.is_empty() {
                    self.key = Key::Free;
                }
                self.set_till();
                if let (Some(_), Some(first)) = (rests_until, self.queue.first().copied()) {
                    self.publish(Notification::Hint { lease: first.lease });
                }
            }
            _ => {}
        }
        if serves {
            self.serve(true, rules);
        }
    }
}

/// The clients.
impl State {
    fn set_client(&mut self, client: usize, state: Client) {
        self.clients[client] = state;
        self.replies[client] = None;
    }

    fn acquire_anew(&mut self, client: usize, rules: &Rules) {
        let attempt = if rules.new_lease_ids {
            self.limits.attempts[client]
        } else {
            0
        };
        self.limits.attempts[client] -= 1;
        let lease = LeaseId {
            client,
            attempt,
            is_converted: false,
        };
        self.ask(lease, self.now, Command::Join { is_late: false });
    }

    fn ask(&mut self, lease: LeaseId, first: Tick, command: Command) {
        let since = self.now;
        self.set_client(
            lease.client,
            Client::Asking {
                lease,
                first,
                since,
            },
        );
        self.send(lease, command);
    }

    /// Ends a lease that was not used.
    fn undo(&mut self, lease: LeaseId) {
        self.set_client(lease.client, Client::Idle);
        self.send(lease, Command::Release { granted: None });
        self.abandoned.push(lease);
        self.abandoned.sort_unstable();
        self.abandoned.dedup();
    }

    /// The client relies on its grant, for which it asked at `since`.
    fn believe(&mut self, lease: LeaseId, since: Tick, granted: Tick, rules: &Rules) {
        let valid_from = if rules.valid_from_request {
            since
        } else {
            self.now
        };
        let valid_until = valid_from + rules.ttl;
        if self.now >= valid_until {
            return self.undo(lease);
        }
        if rules.min_hold > 0 {
            let at = self.seen.starts.partition_point(|start| *start <= granted);
            self.seen.starts.insert(at, granted);
        }
        let renewing = None;
        self.set_client(
            lease.client,
            Client::Holding {
                lease,
                granted,
                valid_until,
                renewing,
            },
        );
    }

    fn read(&mut self, client: usize, rules: &Rules) {
        let reply = self.replies[client].take().expect("there is a reply");
        match (self.clients[client], reply) {
            (Client::Asking { lease, since, .. }, Reply::Granted { at, .. }) => {
                self.believe(lease, since, at, rules)
            }
            (Client::Asking { lease, first, .. }, Reply::Queued { until }) => {
                let ask_at = until.min(self.now + rules.poll);
                self.set_client(
                    client,
                    Client::Waiting {
                        lease,
                        first,
                        ask_at,
                    },
                );
            }
            (Client::Asking { lease, first, .. }, Reply::Missing) => {
                self.ask(lease, first, Command::Join { is_late: true })
            }
            (
                Client::Holding {
                    lease,
                    granted,
                    renewing: Some(since),
                    ..
                },
                Reply::Renewed,
            ) => {
                let valid_from = if rules.valid_from_request {
                    since
                } else {
                    self.now
                };
                let valid_until = valid_from + rules.ttl;
                self.set_client(
                    client,
                    Client::Holding {
                        lease,
                        granted,
                        valid_until,
                        renewing: None,
                    },
                );
            }
            (Client::Converting { lease, since, .. }, Reply::Granted { at, .. }) => {
                self.believe(lease.converted(), since, at, rules)
            }
            (
                Client::Converting {
                    lease,
                    granted,
                    valid_until,
                    ..
                },
                Reply::NotConverted,
            ) => {
                let holding = Client::Holding {
                    lease,
                    granted,
                    valid_until,
                    renewing: None,
                };
                self.set_client(client, holding);
            }
            _ => self.set_client(client, Client::Idle),
        }
    }

    /// Ends a conversion without a reply. Redis may have carried it out or not, so the client releases both leases.
    fn undo_conversion(&mut self, lease: LeaseId) {
        self.undo(lease);
        self.undo(lease.converted());
    }

    fn notify(&mut self, notification: Notification, rules: &Rules) {
        self.notifications.retain(|other| *other != notification);
        let lease = notification.lease();
        match (self.clients[lease.client], notification) {
            (
                Client::Waiting {
                    lease: waiting,
                    first,
                    ..
                },
                _,
            ) if waiting == lease => match notification {
                // The validity counts from the first request, so a later grant is confirmed in any case.
                Notification::Granted {
                    at,
                    has_to_confirm: false,
                    ..
                } if self.now <= first + rules.fresh => self.believe(lease, first, at, rules),
                _ => self.ask(lease, first, Command::Ask),
            },
            (_, Notification::Granted { .. }) if self.abandoned.contains(&lease) => {
                self.send(lease, Command::Release { granted: None });
            }
            _ => {}
        }
    }

    fn crash(&mut self, client: usize) {
        self.set_client(client, Client::Crashed);
        self.notifications
            .retain(|sent| sent.lease().client != client);
        // A renewal on its way is left out: it has the same effect as one before the crash, or as a lost one.
        self.requests
            .retain(|sent| sent.lease.client != client || sent.command != Command::Renew);
    }

    /// Whether the first waiter is alive, and fits beside the shares that have not ended.
    fn has_room_for_first(&self, rules: &Rules) -> bool {
        let Some(Waiter { lease, .. }) = self.queue.first().copied() else {
            return false;
        };
        let mut really = self.clone();
        let purges = true;
        really.look(self.clock(), &Rules { purges, ..*rules });
        self.clients[lease.client].wants(lease) && really.fits(lease, rules)
    }

    /// Whether the first waiter fits and sleeps, and nothing is on its way that could wake it.
    fn sleeps_beside_room(&self, rules: &Rules) -> bool {
        let is_quiet = self.requests.is_empty()
            && self.notifications.is_empty()
            && self.replies == [None; CLIENTS];
        let first = self
            .queue
            .first()
            .map(|first| self.clients[first.lease.client]);
        let sleeps = matches!(first, Some(Client::Waiting { .. }));
        is_quiet && sleeps && self.has_room_for_first(rules)
    }

    fn tick(&mut self, rules: &Rules) {
        let sleeps = self.sleeps_beside_room(rules);
        self.now += 1;
        for client in 0..CLIENTS {
            if let Client::Holding { valid_until, .. } = self.clients[client]
                && valid_until <= self.now
            {
                self.set_client(client, Client::Idle);
            }
            if let Client::Converting {
                lease, valid_until, ..
            } = self.clients[client]
                && valid_until <= self.now
            {
                self.undo_conversion(lease);
            }
        }
        self.seen.asleep = if sleeps { self.seen.asleep + 1 } else { 0 };
    }

    /// The leases that clients rely on.
    fn valid(&self, rules: &Rules) -> Vec<LeaseId> {
        let holding = self.clients.iter().filter_map(|client| match client {
            Client::Holding { lease, .. } => Some(*lease),
            Client::Converting { lease, .. } if rules.mode(*lease) == Mode::Reader => Some(*lease),
            Client::Converting { lease, .. } => Some(lease.converted()),
            _ => None,
        });
        holding.collect()
    }

    /// Whether a client relies on a converted lease of this mode.
    fn has_converted(&self, mode: Mode, rules: &Rules) -> bool {
        let valid = self.valid(rules).into_iter();
        let mut converted = valid.filter(|lease| lease.is_converted);
        converted.any(|lease| rules.mode(lease) == mode)
    }

    /// Whether each share ends by itself: its own ttl after its last grant or renewal.
    fn shares_end(&self, rules: &Rules) -> bool {
        let shift = self.shift(rules);
        let Key::Shared { shares, till } = &self.key else {
            return true;
        };
        shares.iter().all(|share| {
            let ends = i16::from(share.ends) + shift - i16::from(self.ahead);
            let ends = ends.min(i16::from(*till));
            ends <= i16::from(share.asked + rules.first_ttl(share.lease))
        })
    }

    fn window_is_kept(&self, rules: &Rules) -> bool {
        let too_many = usize::from(rules.limit) + 1;
        let spans = self
            .seen
            .starts
            .windows(too_many)
            .map(|starts| starts[too_many - 1] - starts[0]);
        spans.min().is_none_or(|span| span >= rules.min_hold)
    }

    /// Removes state that has no effect later, so that the model has fewer states.
    fn simplify(&mut self) {
        // These releases have no effect: Redis does not have the lease, and no request on its way can add it.
        let is_needed = |release: &Request| {
            let others = self.requests.iter().filter(|other| *other != release);
            let adds = |other: &Request| match other.command {
                Command::Convert => other.lease.converted() == release.lease,
                _ => false,
            };
            self.requests.iter().any(adds)
                || self.holders().contains(&release.lease)
                || self
                    .queue
                    .iter()
                    .any(|waiter| waiter.lease == release.lease)
                || others
                    .map(|other| other.lease)
                    .any(|lease| lease == release.lease)
        };
        let is_release = |request: &Request| matches!(request.command, Command::Release { .. });
        let useless = self
            .requests
            .iter()
            .filter(|request| is_release(request) && !is_needed(request));
        let useless: Vec<Request> = useless.copied().collect();
        self.requests.retain(|request| !useless.contains(request));
    }
}

impl Model for Shares {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let state = |ahead| State {
            now: START,
            limits: self.limits,
            ahead,
            key: Key::Free,
            queue: Vec::new(),
            counter: 0,
            requests: Vec::new(),
            replies: [None; CLIENTS],
            notifications: Vec::new(),
            clients: [Client::Idle; CLIENTS],
            abandoned: Vec::new(),
            seen: Seen {
                last_token: 0,
                tokens_increase: true,
                in_order: true,
                is_served: true,
                asleep: 0,
                starts: Vec::new(),
            },
        };
        let mut clocks = vec![0, self.rules.ahead];
        clocks.dedup();
        clocks.into_iter().map(state).collect()
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        let Limits {
            renewals,
            conversions,
            crashes,
            losses,
            ends,
            moves,
            ..
        } = state.limits;
        let is_due = |client: &Client| matches!(client, Client::Waiting { ask_at, .. } if *ask_at <= state.now);
        let has_begun = state.limits.attempts != self.limits.attempts;
        let is_shared = matches!(state.key, Key::Shared { .. });
        let is_equal = self.rules.modes[0] == self.rules.modes[1]
            && self.limits.attempts[0] == self.limits.attempts[1];
        let is_second = is_equal && state.limits.attempts[0] == self.limits.attempts[0];
        if has_begun && state.now < START + self.limits.ticks && !state.clients.iter().any(is_due) {
            actions.push(Action::Tick);
        }
        if moves > 0 && is_shared {
            actions.push(Action::Move);
        }
        for request in &state.requests {
            actions.push(Action::Deliver(*request));
            if losses > 0 {
                actions.push(Action::LoseRequest(*request));
                actions.push(Action::DeliverUnanswered(*request));
            }
        }
        for notification in &state.notifications {
            let lease = notification.lease();
            let is_asking = matches!(state.clients[lease.client], Client::Asking { lease: asked, .. } if asked == lease);
            if !is_asking {
                actions.push(Action::Notify(*notification));
            }
            if losses > 0 {
                actions.push(Action::LoseNotification(*notification));
            }
        }
        for (number, client) in state.clients.iter().enumerate() {
            if state.replies[number].is_some() {
                actions.push(Action::Read(number));
            }
            match client {
                // It does not matter which of two equal clients begins.
                Client::Idle if number == 1 && is_second => {}
                Client::Idle if state.limits.attempts[number] > 0 => {
                    actions.push(Action::Acquire(number))
                }
                Client::Asking { .. } if ends > 0 => actions.push(Action::EndCall(number)),
                Client::Waiting { ask_at, .. } => {
                    if *ask_at <= state.now {
                        actions.push(Action::Ask(number));
                    }
                    if ends > 0 {
                        actions.push(Action::EndCall(number));
                    }
                }
                Client::Holding {
                    lease, renewing, ..
                } => {
                    actions.push(Action::Release(number));
                    if renewals > 0 && renewing.is_none() {
                        actions.push(Action::Renew(number));
                    }
                    let is_new = !lease.is_converted && renewing.is_none();
                    let is_permit = matches!(self.rules.mode(*lease), Mode::Permits(_));
                    if conversions > 0 && is_new && !is_permit {
                        actions.push(Action::Convert(number));
                    }
                }
                Client::Converting { .. } if ends > 0 => actions.push(Action::EndCall(number)),
                _ => {}
            }
            if crashes > 0 && client.lease().is_some() {
                actions.push(Action::Crash(number));
            }
        }
    }

    fn next_state(&self, state: &State, action: Action) -> Option<State> {
        let Self { rules, .. } = self;
        let mut state = state.clone();
        match action {
            Action::Tick => state.tick(rules),
            Action::Move => {
                state.limits.moves -= 1;
                state.ahead = rules.ahead - state.ahead;
            }
            Action::Acquire(client) => state.acquire_anew(client, rules),
            Action::Ask(client) => {
                if let Client::Waiting { lease, first, .. } = state.clients[client] {
                    state.ask(lease, first, Command::Ask);
                }
            }
            Action::EndCall(client) => {
                state.limits.ends -= 1;
                let lease = state.clients[client].lease().expect("it waits");
                match state.clients[client] {
                    Client::Converting { .. } => state.undo_conversion(lease),
                    _ => state.undo(lease),
                }
            }
            Action::Renew(client) => {
                state.limits.renewals -= 1;
                let now = state.now;
                if let Client::Holding {
                    lease, renewing, ..
                } = &mut state.clients[client]
                {
                    *renewing = Some(now);
                    let lease = *lease;
                    state.send(lease, Command::Renew);
                }
            }
            Action::Convert(client) => {
                state.limits.conversions -= 1;
                let since = state.now;
                if let Client::Holding {
                    lease,
                    granted,
                    valid_until,
                    ..
                } = state.clients[client]
                {
                    let converting = Client::Converting {
                        lease,
                        granted,
                        valid_until,
                        since,
                    };
                    state.set_client(client, converting);
                    state.send(lease, Command::Convert);
                }
            }
            Action::Release(client) => {
                if let Client::Holding { lease, granted, .. } = state.clients[client] {
                    state.set_client(client, Client::Idle);
                    state.send(
                        lease,
                        Command::Release {
                            granted: Some(granted),
                        },
                    );
                }
            }
            Action::Crash(client) => {
                state.limits.crashes -= 1;
                state.crash(client);
            }
            Action::Deliver(request) => {
                state.requests.retain(|other| *other != request);
                let reply = state.carry_out(request, rules);
                let client = request.lease.client;
                let awaits = match (state.clients[client], request.command) {
                    (Client::Asking { lease, .. }, Command::Join { .. } | Command::Ask) => {
                        lease == request.lease
                    }
                    (
                        Client::Holding {
                            lease,
                            renewing: Some(_),
                            ..
                        },
                        Command::Renew,
                    )
                    | (Client::Converting { lease, .. }, Command::Convert) => {
                        lease == request.lease
                    }
                    _ => false,
                };
                if awaits && reply.is_some() {
                    state.replies[client] = reply;
                    // Only the reply that grants the key has an effect if it comes late.
                    if !matches!(reply, Some(Reply::Granted { .. })) {
                        state.read(client, rules);
                    }
                }
            }
            Action::LoseRequest(request) => {
                state.limits.losses -= 1;
                state.requests.retain(|other| *other != request);
            }
            Action::Read(client) => state.read(client, rules),
            Action::DeliverUnanswered(request) => {
                state.limits.losses -= 1;
                state.requests.retain(|other| *other != request);
                state.carry_out(request, rules);
            }
            Action::Notify(notification) => state.notify(notification, rules),
            Action::LoseNotification(notification) => {
                state.limits.losses -= 1;
                state.notifications.retain(|other| *other != notification);
            }
        }
        state.simplify();
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(
                "valid leases fit together",
                |model: &Self, state: &State| model.rules.admits(&state.valid(&model.rules)),
            ),
            Property::always(
                "no waiter sleeps beside room",
                |model: &Self, state: &State| state.seen.asleep <= model.rules.longest_sleep,
            ),
            Property::always(
                "no script leaves room beside the first waiter",
                |_, state: &State| state.seen.is_served,
            ),
            Property::always("waiters are served in order", |_, state: &State| {
                state.seen.in_order
            }),
            Property::always("tokens increase", |_, state: &State| {
                state.seen.tokens_increase
            }),
            Property::always(
                "each share ends by itself",
                |model: &Self, state: &State| state.shares_end(&model.rules),
            ),
            Property::always(
                "a window has at most the limit of starts",
                |model: &Self, state: &State| state.window_is_kept(&model.rules),
            ),
            Property::sometimes("leases share the key", |model: &Self, state: &State| {
                state.valid(&model.rules).len() > 1
            }),
            Property::sometimes(
                "a reader has become the writer",
                |model: &Self, state: &State| state.has_converted(Mode::Alone, &model.rules),
            ),
            Property::sometimes(
                "a writer has become a reader",
                |model: &Self, state: &State| state.has_converted(Mode::Reader, &model.rules),
            ),
            Property::sometimes("a second waiter is queued", |_, state: &State| {
                state.queue.len() > 1
            }),
            Property::sometimes("a late waiter joins again", |_, state: &State| {
                let is_late =
                    |request: &Request| request.command == Command::Join { is_late: true };
                state.requests.iter().any(is_late)
            }),
            Property::sometimes(
                "a share is held beside an ended one",
                |model: &Self, state: &State| {
                    let Key::Shared { shares, .. } = &state.key else {
                        return false;
                    };
                    let has_ended = |share: &Share| share.ends <= state.clock();
                    shares.iter().any(has_ended)
                        && !shares.iter().all(has_ended)
                        && !state.valid(&model.rules).is_empty()
                },
            ),
            Property::sometimes("a valid share has moved", |model: &Self, state: &State| {
                state.shift(&model.rules) != 0 && !state.valid(&model.rules).is_empty()
            }),
        ]
    }
}
