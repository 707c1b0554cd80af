//! Runs of work that shall run once for its name. The names are those of the last seconds, so many threads ask for
//! each.

use std::time::Duration;

use leasehold::{Client, Error, MutexGuard, Once, Run};

use super::{Doing, Terms, Thread, What};
use crate::messages::{is_at_most_once, key_name, present_run};
use crate::records::now;

/// How far back the names of most runs go.
const RECENT: usize = 8;
const OLD: usize = 60;

/// The error of work that may run again.
enum WorkError {
    Failed,
    Of(Error),
}

impl From<Error> for WorkError {
    fn from(error: Error) -> Self {
        Self::Of(error)
    }
}

impl Thread<'_> {
    pub fn run_once(&mut self, client: &Client) {
        let back = match self.random.one_in(8) {
            true => self.random.below(OLD),
            false => self.random.below(RECENT),
        };
        let key = present_run() - back;
        let once = once_of(client, key);
        let (once, terms) = match self.random.one_in(8) {
            true => {
                let ttl = self.random.millis(300, 900);
                let terms = Terms {
                    ttl: Some(ttl),
                    at_most: None,
                };
                (once.ttl(ttl), terms)
            }
            false => (once, Terms::default()),
        };
        let allowed = match self.random.below(4) {
            0 => Some(Duration::ZERO),
            1 => Some(self.random.millis(0, 400)),
            _ => None,
        };
        let (asked, mut since, mut token) = (self.asks(Doing::Run, key, allowed), 0, None);
        let mut work = |guard: &MutexGuard| {
            self.returned(asked, None);
            token = Some(guard.fencing_token());
            self.held(guard, key, terms);
            self.records.write(What::RunBegan {
                key,
                token: guard.fencing_token(),
                since: asked,
            });
            self.stay(guard);
            let fails = self.random.one_in(8);
            if fails {
                self.records.write(What::RunFailed { key });
            }
            self.records.write(What::Releasing);
            let outage = Some(self.shared.assignment.outage);
            since = self.asks(Doing::EndRun, key, outage);
            match fails {
                true => Err(WorkError::Failed),
                false => Ok(guard.fencing_token().to_string()),
            }
        };
        let result = match allowed {
            None => once.run(&mut work).map(Some),
            Some(Duration::ZERO) => once.try_run(&mut work),
            Some(time) => once.try_run_for(time, &mut work),
        };
        let since = if token.is_some() { since } else { asked };
        let error = match &result {
            Err(WorkError::Of(error)) => Some(error),
            _ => None,
        };
        self.returned(since, error);
        if let Ok(Some(run)) = result {
            self.records.write(end_of(key, asked, run));
        }
    }

    /// Writes the record before a call, and returns the time of the call.
    fn asks(&mut self, doing: Doing, key: usize, allowed: Option<Duration>) -> u64 {
        self.records.write(What::Called {
            doing,
            key: Some(key),
            allowed: allowed.map(|allowed| allowed.as_millis() as u64),
        });
        now()
    }
}

fn once_of(client: &Client, key: usize) -> Once {
    let once = client.once(key_name(key));
    match is_at_most_once(key) {
        true => once.at_most_once(),
        false => once,
    }
}

/// The record of the outcome of a call that began at `since`.
fn end_of(key: usize, since: u64, run: Run<String>) -> What {
    let (token, is_done) = match run {
        Run::Ran(text) => (text.parse().unwrap_or(0), true),
        Run::Done(record) => {
            let token = record.fencing_token();
            if record.result() != token.to_string().as_bytes() {
                return What::Wrong(format!("the record has another result: {record:?}"));
            }
            (token, true)
        }
        Run::Interrupted(record) if is_at_most_once(key) => (record.fencing_token(), false),
        Run::Interrupted(record) => return What::Wrong(format!("{record:?} is of a start")),
    };
    What::RunEnded {
        key,
        token,
        is_done,
        since,
    }
}

/// Asks for the run once more, at the end of a round. Returns the records of the call.
pub fn ask_again(client: &Client, key: usize) -> Result<Vec<What>, Error> {
    let (since, mut records) = (now(), Vec::new());
    let run = once_of(client, key).run(|guard| {
        let token = guard.fencing_token();
        records.push(What::RunBegan { key, token, since });
        Ok::<_, Error>(token.to_string())
    })?;
    records.push(end_of(key, since, run));
    Ok(records)
}
