//! A lock by hand, as known designs write it: single commands over a connection of its own. Right in
//! nothing but what each test says.

use std::time::Duration;

use leasehold_testbed::{Server, eventually};
use redis::{Connection, FromRedisValue};

use crate::support::{SOON, in_redis};

/// One client of a broken design.
pub struct Raw {
    connection: Connection,
    key: String,
    pub token: String,
}

impl Raw {
    /// For the lock of this name, where the library has its own.
    pub fn open(server: &Server, key: &str, token: &str) -> Self {
        let client = redis::Client::open(server.url()).unwrap();
        let connection = client.get_connection_with_timeout(SOON).unwrap();
        Self {
            connection,
            key: in_redis(key),
            token: token.to_owned(),
        }
    }

    /// A command whose first argument is the lock's key.
    pub fn ask<T: FromRedisValue>(&mut self, command: &str, args: &[&str]) -> T {
        let mut command = redis::cmd(command);
        command.arg(&self.key).arg(args);
        command.query(&mut self.connection).unwrap()
    }

    /// One without it.
    pub fn say<T: FromRedisValue>(&mut self, command: &str, args: &[&str]) -> T {
        redis::cmd(command)
            .arg(args)
            .query(&mut self.connection)
            .unwrap()
    }

    /// As it should be: one command.
    pub fn take(&mut self, ttl: Duration) -> bool {
        let (token, ttl) = (self.token.clone(), ttl.as_millis().to_string());
        let answer: Option<String> = self.ask("SET", &[&token, "NX", "PX", &ttl]);
        answer.is_some()
    }

    /// As [`take`](Self::take), and returns when the ttl has ended.
    pub fn take_and_let_expire(&mut self, ttl: Duration) {
        assert!(self.take(ttl));
        let expired = eventually(SOON, || !self.ask::<bool>("EXISTS", &[]));
        assert!(expired, "after its ttl");
    }
}
