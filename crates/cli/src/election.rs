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
#[serde(tag = "state", rename_all = "snake_case")]
enum State<'a> {
    Leader {
        key: &'a str,
        /// Missing until the leader has proclaimed a value. The character U+FFFD replaces bytes that are not UTF-8.
        #[serde(skip_serializing_if = "Option::is_none")]
        value: Option<String>,
        holder: String,
        /// A string, since JSON parsers round numbers of this size.
        fencing_token: String,
        /// Missing if the term has no ttl.
        #[serde(skip_serializing_if = "Option::is_none")]
        expires_in_ms: Option<u64>,
    },
    Vacant {
        key: &'a str,
    },
    Unknown {
        key: &'a str,
    },
}

impl<'a> State<'a> {
    fn new(key: &'a str, state: &LeaderState) -> Self {
        match state {
            LeaderState::Leader(leader) => {
                let value = leader.value().map(String::from_utf8_lossy);
                Self::Leader {
                    key,
                    value: value.map(|value| value.into_owned()),
                    holder: leader.holder().to_string(),
                    fencing_token: leader.fencing_token().to_string(),
                    expires_in_ms: leader.expires_in().map(millis),
                }
            }
            LeaderState::Vacant => Self::Vacant { key },
            LeaderState::Unknown => Self::Unknown { key },
        }
    }
}

impl fmt::Display for State<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Leader {
                key,
                value,
                holder,
                fencing_token,
                ..
            } => {
                write!(f, "{key} is led by {holder} with token {fencing_token}")?;
                match value {
                    // The debug format keeps a value with line breaks on one line.
                    Some(value) => write!(f, ": {value:?}"),
                    None => write!(f, ", without a value so far"),
                }
            }
            Self::Vacant { key } => write!(f, "{key} has no leader"),
            Self::Unknown { key } => {
                write!(f, "{key} may have another leader: Redis does not answer")
            }
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
    // This call reports a missing right. An observer would only report the state as unknown.
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
