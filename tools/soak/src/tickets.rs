//! Tickets for transfers between processes. Each ticket is a file, and the process that renames the file gets the
//! ticket.

use std::fs;
use std::io;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// A transferred lock.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct Ticket {
    pub key: usize,
    pub token: u64,
    pub ttl: Duration,
    pub text: String,
}

pub fn leave(folder: &Path, ticket: &Ticket) -> io::Result<()> {
    let draft = folder.join(format!("{}.draft", Uuid::new_v4()));
    fs::write(&draft, serde_json::to_string(ticket)?)?;
    fs::rename(&draft, draft.with_extension("ticket"))
}

/// A ticket that no other process takes, if there is one.
pub fn take(folder: &Path) -> io::Result<Option<Ticket>> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_none_or(|found| found != "ticket") {
            continue;
        }
        let taken = path.with_extension("taken");
        if fs::rename(&path, &taken).is_ok() {
            let text = fs::read_to_string(&taken)?;
            fs::remove_file(&taken)?;
            return Ok(Some(serde_json::from_str(&text)?));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ticket_is_taken_once() {
        let folder = tempfile::tempdir().unwrap();
        let ticket = Ticket {
            key: 1,
            token: 2,
            ttl: Duration::from_secs(3),
            text: "x".to_owned(),
        };
        leave(folder.path(), &ticket).unwrap();
        assert_eq!(take(folder.path()).unwrap(), Some(ticket));
        assert_eq!(take(folder.path()).unwrap(), None);
    }
}
