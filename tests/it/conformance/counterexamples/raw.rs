//! A lock made of single commands over a connection of its own, as known designs write it. Each test says
//! which mistake it makes.

use std::time::Duration;

use leasehold_testbed::{Server, eventually};
use redis::{Connection, FromRedisValue};

use crate::support::{SOON, in_redis};

/// A client of a design with a mistake.
pub struct Raw {
    connection: Connection,
    key: String,
    pub token: String,
}

impl Raw {
    /// Uses the key that the library uses for the lock of this name.
    pub fn open(server: &Server, key: &str, token: &str) -> Self {
        let client = redis::Client::open(server.url()).unwrap();
        let connection = client.get_connection_with_timeout(SOON).unwrap();
        Self {
            connection,
            key: in_redis(key),
            token: token.to_owned(),
        }
    }

    /// Runs a command whose first argument is the lock's key.
    pub fn ask<T: FromRedisValue>(&mut self, command: &str, args: &[&str]) -> T {
        let mut command = redis::cmd(command);
        command.arg(&self.key).arg(args);
        command.query(&mut self.connection).unwrap()
    }

    /// Runs a command without the lock's key.
    pub fn say<T: FromRedisValue>(&mut self, command: &str, args: &[&str]) -> T {
        redis::cmd(command)
            .arg(args)
            .query(&mut self.connection)
            .unwrap()
    }

    /// Acquires correctly: with one command.
    pub fn take(&mut self, ttl: Duration) -> bool {
        let (token, ttl) = (self.token.clone(), ttl.as_millis().to_string());
        let answer: Option<String> = self.ask("SET", &[&token, "NX", "PX", &ttl]);
        answer.is_some()
    }

    /// As [`take`](Self::take); returns when the ttl has ended.
    pub fn take_and_let_expire(&mut self, ttl: Duration) {
        assert!(self.take(ttl));
        let expired = eventually(SOON, || !self.ask::<bool>("EXISTS", &[]));
        assert!(expired, "after its ttl");
    }
}
