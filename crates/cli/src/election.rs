//! `leasehold observe`: writes the leader of an election, and each change.

use std::fmt;
use std::process::ExitCode;

use leasehold::LeaderState;
use leasehold::crossbeam_channel::select;
use serde::Serialize;

use crate::args::{Connection, Observe};
use crate::connection::Settings;
use crate::exit::Failure;
use crate::output::{Output, json, line, millis};
use crate::watch::end_signal;

/// A state of an election. docs/cli.md documents the fields.
#[derive(Serialize)]
struct State<'a> {
    state: Kind,
    key: &'a str,
    #[serde(flatten)]
    leader: Option<Leader>,
}

#[derive(Clone, Copy, Serialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Leader,
    Vacant,
    Unknown,
}

#[derive(Serialize)]
struct Leader {
    /// Missing until the leader has proclaimed a value. The character U+FFFD replaces bytes that are not UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<String>,
    holder: String,
    /// A string, since JSON parsers round numbers of this size.
    fencing_token: String,
    /// Missing if the term has no ttl.
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_in_ms: Option<u64>,
}

impl<'a> State<'a> {
    fn new(key: &'a str, state: &LeaderState) -> Self {
        let (kind, leader) = match state {
            LeaderState::Leader(leader) => {
                let value = leader.value().map(String::from_utf8_lossy);
                let leader = Leader {
                    value: value.map(|value| value.into_owned()),
                    holder: leader.holder().to_string(),
                    fencing_token: leader.fencing_token().to_string(),
                    expires_in_ms: leader.expires_in().map(millis),
                };
                (Kind::Leader, Some(leader))
            }
            LeaderState::Vacant => (Kind::Vacant, None),
            LeaderState::Unknown => (Kind::Unknown, None),
        };
        Self {
            state: kind,
            key,
            leader,
        }
    }
}

impl fmt::Display for State<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let key = self.key;
        match (&self.leader, self.state) {
            (Some(leader), _) => {
                let Leader {
                    holder,
                    fencing_token,
                    ..
                } = leader;
                write!(f, "{key} is led by {holder} with token {fencing_token}")?;
                match &leader.value {
                    // The debug format keeps a value with line breaks on one line.
                    Some(value) => write!(f, ": {value:?}"),
                    None => write!(f, ", without a value so far"),
                }
            }
            (None, Kind::Unknown) => {
                write!(f, "{key} may have another leader: Redis does not answer")
            }
            (None, _) => write!(f, "{key} has no leader"),
        }
    }
}

pub fn observe(
    connection: &Connection,
    options: &Observe,
    output: Output,
) -> Result<ExitCode, Failure> {
    let builder = Settings::read(connection, options.ttl)?.builder()?;
    let ended = end_signal()?;
    let client = builder.build()?;
    let election = client.election(&options.name);
    // An observer does not learn why an election cannot be read, such as a right that is missing.
    election.leader()?;
    let states = election.observe()?;
    loop {
        select! {
            recv(states) -> state => {
                let Ok(state) = state else {
                    return Ok(ExitCode::SUCCESS);
                };
                let state = State::new(&options.name, &state);
                match output {
                    Output::Json => json(&state),
                    Output::Text => line(state),
                }
            }
            recv(ended) -> _ => return Ok(ExitCode::SUCCESS),
        }
    }
}
