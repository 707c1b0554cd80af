//! Elections: one leader at a time, and observers that learn of each change.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use leasehold::{Client, ErrorKind, LeaderInfo, LeaderState, Observer};
use leasehold_testbed::eventually;

use crate::conformance::backend::Backend;
use crate::support::{SOON, Task};

/// An observer that checks the order of the tokens.
pub struct Watched {
    states: Observer,
    greatest: u64,
}

impl Watched {
    pub fn new(client: &Client, name: &str) -> Self {
        Self::of(client.election(name).observe().unwrap())
    }

    pub fn of(states: Observer) -> Self {
        Self {
            states,
            greatest: 0,
        }
    }

    /// The next state. Fails if its token is smaller than an earlier one.
    #[track_caller]
    pub fn next(&mut self) -> LeaderState {
        let state = self.states.recv_timeout(6 * SOON).expect("a state comes");
        if let LeaderState::Leader(leader) = &state {
            let token = leader.fencing_token();
            assert!(self.greatest <= token, "{state:?} after {}", self.greatest);
            self.greatest = token;
        }
        state
    }

    /// The next state; `None` once the client has ended.
    pub fn next_or_end(&mut self) -> Option<LeaderState> {
        self.states.next()
    }

    /// Skips states until a wanted one. Fails at a state that `may_come` refuses.
    #[track_caller]
    fn skip_until(
        &mut self,
        may_come: impl Fn(&LeaderState) -> bool,
        is_wanted: impl Fn(&LeaderState) -> bool,
    ) -> LeaderState {
        loop {
            let state = self.next();
            if is_wanted(&state) {
                return state;
            }
            assert!(may_come(&state), "{state:?}");
        }
    }

    /// Waits for the leader with this value.
    #[track_caller]
    pub fn wait_for(&mut self, value: &str) -> LeaderInfo {
        leader_in(self.skip_until(|_| true, |state| leads(state, value)))
    }

    /// Waits for the leader with this value. Fails if the election is vacant before.
    #[track_caller]
    pub fn wait_without_vacancy_for(&mut self, value: &str) -> LeaderInfo {
        let is_leader = |state: &LeaderState| matches!(state, LeaderState::Leader(_));
        leader_in(self.skip_until(is_leader, |state| leads(state, value)))
    }

    #[track_caller]
    pub fn wait_until_vacant(&mut self) {
        self.skip_until(|_| true, |state| *state == LeaderState::Vacant);
    }

    /// Whether the channel is empty.
    pub fn is_quiet(&self) -> bool {
        self.states.is_empty()
    }
}

fn leads(state: &LeaderState, value: &str) -> bool {
    matches!(state, LeaderState::Leader(leader) if leader.value() == Some(value.as_bytes()))
}

fn leader_in(state: LeaderState) -> LeaderInfo {
    match state {
        LeaderState::Leader(leader) => leader,
        other => panic!("{other:?}"),
    }
}

fn value_of(client: &Client, name: &str) -> Option<String> {
    let leader = client.election(name).leader().unwrap()?;
    Some(String::from_utf8(leader.value()?.to_vec()).unwrap())
}

/// Waits until candidates wait in the queue of the leader.
pub fn wait_for_candidates(client: &Client, name: &str, count: usize) {
    let mutex = client.mutex(name);
    let waiting = || {
        mutex
            .inspect()
            .unwrap()
            .map(|found| found.clients_waiting())
    };
    assert!(eventually(SOON, || waiting() == Some(count)));
}

pub fn observers_see_each_leader_and_its_values(backend: &dyn Backend) {
    let (one, two, third) = (backend.client(), backend.client(), backend.client());
    let mut states = Watched::new(&third, "k");
    assert_eq!(states.next(), LeaderState::Vacant);
    assert!(third.election("k").leader().unwrap().is_none());
    let term = one.election("k").campaign("a").unwrap();
    let leader = states.wait_for("a");
    assert_eq!(leader.fencing_token(), term.fencing_token());
    assert_eq!(leader.holder(), one.holder_id());
    for value in ["b", "c", ""] {
        term.proclaim(value).unwrap();
        // The other observer of this client may not know the value yet.
        let first = Watched::new(&third, "k").next();
        assert!(leads(&first, value), "{first:?}");
        states.wait_without_vacancy_for(value);
        assert_eq!(value_of(&third, "k").as_deref(), Some(value));
    }
    // An observer that comes late, on another client.
    let first = Watched::new(&one, "k").next();
    assert!(leads(&first, ""), "{first:?}");
    let election = two.election("k");
    let next = Task::start(move || election.campaign("d").unwrap());
    wait_for_candidates(&third, "k", 1);
    term.resign().unwrap();
    let next = next.within(6 * SOON, "the next term");
    let seen = states.wait_without_vacancy_for("d");
    assert_eq!(seen.fencing_token(), next.fencing_token());
    assert!(seen.fencing_token() > leader.fencing_token());
    drop(next);
    states.wait_until_vacant();
}

pub fn one_candidate_leads_at_a_time(backend: &dyn Backend) {
    let clients = [(); 3].map(|()| backend.client());
    let inside = Arc::new(AtomicUsize::new(0));
    let tasks = clients.each_ref().map(|client| {
        let (election, inside) = (client.election("k"), Arc::clone(&inside));
        Task::start(move || {
            let mut tokens = Vec::new();
            for _ in 0..5 {
                let token = election.run("me", |leader| {
                    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                    leader.check().unwrap();
                    inside.fetch_sub(1, Ordering::SeqCst);
                    leader.fencing_token()
                });
                tokens.push(token.unwrap());
            }
            tokens
        })
    });
    let mut tokens = tasks
        .map(|task| task.within(6 * SOON, "the terms"))
        .concat();
    let count = tokens.len();
    tokens.sort_unstable();
    tokens.dedup();
    assert_eq!((tokens.len(), count), (15, 15));
    // A leader that campaigns again does not lead twice.
    let term = clients[0].election("k").campaign("first").unwrap();
    for client in &clients {
        assert!(
            client
                .election("k")
                .try_campaign("second")
                .unwrap()
                .is_none()
        );
    }
    assert_eq!(value_of(&clients[1], "k").as_deref(), Some("first"));
    term.resign().unwrap();
    let term = clients[1].election("k").try_campaign("second").unwrap();
    assert!(term.is_some());
}

pub fn a_crashed_leader_is_replaced(backend: &dyn Backend) {
    let (crashed, next) = (backend.client(), backend.client());
    let ttl = backend.ttl();
    let mut states = Watched::of(next.election("k").ttl(ttl).observe().unwrap());
    // The leader does not renew its term any more, as if its process had ended.
    let term = crashed.mutex("k").fixed_ttl(ttl).election();
    let term = term.campaign("a").unwrap();
    states.wait_for("a");
    assert!(next.election("k").try_campaign("b").unwrap().is_none());
    backend.pass(ttl + ttl / 10);
    states.wait_until_vacant();
    assert!(term.is_lost());
    let after = next.election("k").campaign("b").unwrap();
    assert!(after.fencing_token() > term.fencing_token());
    states.wait_for("b");
    // The late leader does not replace the value of the next one.
    let error = term.proclaim("late").unwrap_err();
    assert!(error.is_lease_lost(), "{error}");
    let late = next.fenced_value("k").write(term.fencing_token(), "late");
    assert_eq!(late.unwrap_err().kind(), ErrorKind::StaleToken);
    assert_eq!(value_of(&crashed, "k").as_deref(), Some("b"));
}

pub fn a_term_outlives_its_ttl(backend: &dyn Backend) {
    let ttl = backend.ttl();
    let client = backend.builder().ttl(ttl).build().unwrap();
    let other = backend.builder().ttl(ttl).build().unwrap();
    let term = client.election("k").campaign("a").unwrap();
    let mut states = Watched::new(&other, "k");
    states.wait_for("a");
    for _ in 0..3 {
        backend.pass(ttl * 2 / 3);
        assert!(other.election("k").try_campaign("b").unwrap().is_none());
    }
    term.check().unwrap();
    assert_eq!(value_of(&other, "k").as_deref(), Some("a"));
    // Renewals are not reported.
    assert!(states.is_quiet());
}

pub fn a_term_is_handed_over_without_a_vacancy(backend: &dyn Backend) {
    let (old, new) = (backend.client(), backend.client());
    let third = backend.client();
    let term = old.election("k").campaign("version 1").unwrap();
    let token = term.fencing_token();
    let mut states = Watched::new(&third, "k");
    states.wait_for("version 1");
    let waiting = third.election("k");
    let waiting = Task::start(move || waiting.campaign("other").unwrap());
    wait_for_candidates(&third, "k", 1);
    let ticket = term.into_ticket().unwrap();
    let error = new.election("other").adopt(&ticket, "stolen").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidTicket, "{error}");
    let term = new.election("k").adopt(&ticket, "version 2").unwrap();
    assert!(term.fencing_token() > token);
    let seen = states.wait_without_vacancy_for("version 2");
    assert_eq!(seen.holder(), new.holder_id());
    assert!(!waiting.is_done());
    term.resign().unwrap();
    let last = waiting.within(6 * SOON, "the next term");
    states.wait_without_vacancy_for("other");
    last.resign().unwrap();
}

pub fn elections_of_similar_names_are_independent(backend: &dyn Backend) {
    let client = backend.client();
    let names = ["a", "a:", "a:b", "b", "{a}"];
    let terms: Vec<_> = names
        .iter()
        .map(|name| client.election(name).try_campaign(name).unwrap().unwrap())
        .collect();
    for (name, term) in names.iter().zip(&terms) {
        assert_eq!(value_of(&client, name).as_deref(), Some(*name));
        assert_eq!(term.key(), *name);
    }
}

pub fn a_cancelled_campaign_leaves_nothing(backend: &dyn Backend) {
    let (leader, candidate) = (backend.client(), backend.client());
    let term = leader.election("k").campaign("a").unwrap();
    let (stop, stopped) = leasehold::crossbeam_channel::bounded(0);
    let election = candidate.election("k").cancelled_by(stopped);
    let waiting = Task::start(move || election.campaign("b").map(drop));
    wait_for_candidates(&leader, "k", 1);
    drop(stop);
    let error = waiting.within(6 * SOON, "the end of the wait").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Cancelled);
    let short = std::time::Duration::from_millis(200);
    let late = candidate.election("k").try_campaign_for(short, "b");
    assert!(late.unwrap().is_none());
    term.resign().unwrap();
    // The cancelled candidate keeps no turn.
    assert!(leader.election("k").try_campaign("c").unwrap().is_some());
}

pub fn a_flush_ends_the_term_and_observers_know(backend: &dyn Backend) {
    let (leader, other) = (backend.client(), backend.client());
    let mut states = Watched::new(&other, "k");
    let term = leader.election("k").campaign("a").unwrap();
    states.wait_for("a");
    let lost = Arc::new(AtomicUsize::new(0));
    let (count, signal) = (Arc::clone(&lost), term.lost_signal());
    term.on_lost(move |_| _ = count.fetch_add(1, Ordering::SeqCst));
    backend.forget();
    signal.recv_timeout(6 * SOON).unwrap();
    states.wait_until_vacant();
    let token = term.fencing_token();
    assert!(term.resign().unwrap_err().is_lease_lost());
    let next = other.election("k").campaign("b").unwrap();
    assert!(next.fencing_token() > token);
    states.wait_for("b");
    next.on_lost(|_| panic!("it was not lost"));
    next.resign().unwrap();
    let called = || lost.load(Ordering::SeqCst) == 1;
    assert!(eventually(SOON, called));
}
