//! Tickets: the text by which a lock is transferred from one process to another.
//!
//! A ticket is `lht1 <lease id> <token> <ttl> <time between renewals> <rest of max_hold> <for how long Redis may have
//! the key> <length of the prefix> <key in Redis>`. Times are in ms, and `-` stands for a time that the lock does not
//! have. The key comes last, because it may contain spaces.

use std::fmt;
use std::time::Duration;

use crate::command::Mode;
use crate::command::value::MAX_TOKEN;
use crate::config::key::Key;
use crate::config::{Config, MAX_TTL, MIN_TTL};
use crate::lease::Options;
use crate::report::error::{Error, ErrorKind};
use crate::util::id::{LeaseId, number};

const VERSION: &str = "lht1";

/// The content of a ticket: the data of a grant that its adopter needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ticket {
    pub key: Key,
    pub lease: LeaseId,
    pub token: u64,
    /// The old holder's settings, but `max_hold` is the rest of the old holder's `max_hold`.
    pub options: Options,
    /// The longest time for which Redis may have the key.
    pub key_left: Duration,
}

impl Ticket {
    /// Parses a ticket for a client with these settings.
    pub fn read(text: &str, config: &Config) -> Result<Self, Error> {
        let invalid = |why: &str| Error::new(ErrorKind::InvalidTicket, why);
        // Text from a file or a pipe ends with a newline.
        let text = text.trim_end_matches(['\n', '\r']);
        if text.contains(char::is_control) {
            // The second line may be another ticket. An error that shows the key would show this line.
            return Err(invalid("the ticket is not one line of text"));
        }
        let mut words = text.splitn(9, ' ');
        let mut word = || {
            words
                .next()
                .ok_or_else(|| invalid("the ticket is cut short"))
        };
        if word()? != VERSION {
            let wanted = format!("the ticket does not begin with {VERSION:?}");
            return Err(invalid(&wanted));
        }
        // A lease id and its token are enough to make a ticket, so errors do not quote lease ids.
        let lease =
            LeaseId::decode(word()?).ok_or_else(|| invalid("the ticket has no lease id"))?;
        let token = word()?;
        let token = number(token)
            .filter(|number| *number <= MAX_TOKEN)
            .ok_or_else(|| wrong(token, "not a fencing token"))?;
        let ttl = millis(word()?)?.ok_or_else(|| invalid("the ticket has no ttl"))?;
        let (renew_every, max_hold) = (millis(word()?)?, millis(word()?)?);
        let left = word()?;
        let key_left = millis(left)?
            .ok_or_else(|| invalid("the ticket does not say how long its key may live"))?;
        if key_left > MAX_TTL {
            return Err(wrong(left, "longer than the longest ttl, in ms"));
        }
        let prefix_length = number(word()?);
        let full = word()?;
        let name = full.strip_prefix(&*config.prefix);
        let name = name.filter(|_| prefix_length == Some(config.prefix.len() as u64));
        let name = name.ok_or_else(|| {
            let prefix = &config.prefix;
            invalid(&format!(
                "{} is not under this client's prefix {prefix:?}",
                quoted(full, 40)
            ))
        })?;
        let key = Key::new(&config.prefix, name, config.max_key_bytes)?;
        let attach = |error: Error| error.with_key(key.name());
        if ttl.min(max_hold.unwrap_or(ttl)) < MIN_TTL {
            let error = Error::new(
                ErrorKind::NotHeld,
                format!("less than {MIN_TTL:?} was left of its ttl"),
            );
            return Err(attach(error));
        }
        config.check_ttl("ttl of the ticket", ttl).map_err(attach)?;
        if renew_every.is_some_and(|every| every.is_zero() || every >= ttl) {
            return Err(invalid("the ticket's renewals come after its ttl"));
        }
        let options = Options {
            min_hold: Duration::ZERO,
            mode: Mode::Exclusive,
            ttl,
            renew_every,
            max_hold,
            checked: false,
            replicas: config.replicas,
        };
        Ok(Self {
            key,
            lease,
            token,
            options,
            key_left,
        })
    }
}

/// Parses a time in ms; `None` for `-`.
fn millis(word: &str) -> Result<Option<Duration>, Error> {
    if word == "-" {
        return Ok(None);
    }
    let millis = number(word).ok_or_else(|| wrong(word, "not a number of milliseconds"))?;
    Ok(Some(Duration::from_millis(millis)))
}

/// An error that quotes at most twelve characters of `word`, which may be a misplaced lease id.
fn wrong(word: &str, what: &str) -> Error {
    let message = format!("{} is {what}", quoted(word, 12));
    Error::new(ErrorKind::InvalidTicket, message)
}

fn quoted(text: &str, at_most: usize) -> String {
    match text.char_indices().nth(at_most) {
        Some((end, _)) => format!("{:?}..", &text[..end]),
        None => format!("{text:?}"),
    }
}

impl fmt::Display for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Options {
            ttl,
            renew_every,
            max_hold,
            ..
        } = self.options;
        let (lease, token, ttl) = (self.lease, self.token, ttl.as_millis());
        write!(f, "{VERSION} {lease} {token} {ttl}")?;
        for duration in [renew_every, max_hold] {
            match duration {
                // Zero is an invalid time between renewals, so less than 1 ms is written as 1 ms.
                Some(duration) => write!(f, " {}", duration.as_millis().max(1))?,
                None => f.write_str(" -")?,
            }
        }
        let (left, prefix) = (self.key_left.as_millis(), self.key.prefix_length());
        write!(f, " {left} {prefix} {}", self.key.in_redis())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ticket(name: &str) -> Ticket {
        let config = Config::default();
        Ticket {
            key: Key::new(&config.prefix, name, config.max_key_bytes).unwrap(),
            lease: LeaseId::random(),
            token: MAX_TOKEN,
            options: Options::USUAL,
            key_left: Duration::from_secs(31),
        }
    }

    fn refused(text: &str, config: &Config) -> String {
        let error = Ticket::read(text, config).unwrap_err();
        assert_ne!(error.kind(), ErrorKind::Protocol);
        error.to_string()
    }

    #[test]
    fn a_written_ticket_is_read_back() {
        let config = Config::default();
        let plain = ticket("a key with spaces");
        assert_eq!(Ticket::read(&plain.to_string(), &config).unwrap(), plain);
        let mut bounded = ticket("k");
        bounded.options.renew_every = None;
        bounded.options.max_hold = Some(Duration::from_secs(3));
        assert_eq!(
            Ticket::read(&bounded.to_string(), &config).unwrap(),
            bounded
        );
        let mut short = ticket("k ");
        short.options.ttl = Duration::from_millis(10);
        short.options.renew_every = Some(Duration::from_micros(500));
        let read = Ticket::read(&short.to_string(), &config).unwrap();
        assert_eq!(read.options.renew_every, Some(Duration::from_millis(1)));
    }

    #[test]
    fn a_newline_after_a_ticket_is_ignored() {
        let config = Config::default();
        let plain = ticket("k ");
        for end in ["\n", "\r\n"] {
            assert_eq!(
                Ticket::read(&format!("{plain}{end}"), &config).unwrap(),
                plain
            );
        }
        let two = refused(&format!("{plain}\n{plain}"), &config);
        assert!(!two.contains(&plain.lease.to_string()), "{two}");
    }

    #[test]
    fn invalid_tickets_are_refused_with_a_reason() {
        let mut config = Config::default();
        let good = ticket("k").to_string();
        for cut in 0..good.len() - "leasehold:k".len() {
            refused(&good[..cut], &config);
        }
        assert!(refused("", &config).contains("does not begin"));
        assert!(refused("lht1", &config).contains("cut short"));
        let lease = ticket("k").lease.to_string();
        let mixed_up = refused(&good.replace(" 30000 ", &format!(" {lease} ")), &config);
        assert!(!mixed_up.contains(&lease), "{mixed_up}");
        assert!(refused(&good.replace(" 30000 ", " x "), &config).contains("\"x\""));
        let long_word = refused(
            &good.replace(" 30000 ", &format!(" {} ", "x".repeat(99))),
            &config,
        );
        assert!(
            long_word.contains("\"xxxxxxxxxxxx\".. is not a number"),
            "{long_word}"
        );
        let token = format!(" {MAX_TOKEN} ");
        let no_token = refused(&good.replace(&token, " +7 "), &config);
        assert!(
            no_token.contains("\"+7\" is not a fencing token"),
            "{no_token}"
        );
        assert!(refused(&good.replace(" 31000 ", " 86400001 "), &config).contains("\"86400001\""));
        let too_great = refused(&good.replace(&token, " 9223372036854775808 "), &config);
        assert!(too_great.contains("is not a fencing token"), "{too_great}");
        let other_place = good.replace(&token, &format!(" {} ", "c".repeat(LeaseId::DIGITS)));
        assert!(!refused(&other_place, &config).contains(&"c".repeat(13)));
        assert!(
            refused(&good.replace(" 30000 ", " 3 "), &config).contains("less than 10ms was left")
        );
        let long = good.replace(" 30000 ", " 999999999 ");
        assert!(refused(&long, &config).contains("not 999999.999s"));
        assert!(
            refused(&good.replace(" 10000 ", " 30000 "), &config)
                .contains("renewals come after its ttl")
        );
        assert!(refused(&good.replace(":k", ":~fence"), &config).contains("reserved"));
        config.prefix = "leasehold:k".to_owned();
        let nested = refused(&good.replace(":k", ":kk"), &config);
        assert!(nested.contains("leasehold:kk"), "{nested}");
        config.prefix = "billing:".to_owned();
        let other = refused(&good, &config);
        assert!(
            other.contains("leasehold:k") && other.contains("billing:"),
            "{other}"
        );
    }

    #[cfg(not(shuttle))]
    mod fuzz {
        use proptest::prelude::*;

        use super::*;
        use crate::config::MAX_TTL;
        use crate::util::fuzz;
        use crate::util::fuzz::Bytes;

        const PREFIX: &str = "p:";
        const LONGEST_NAME: usize = 64;

        fn config() -> Config {
            Config {
                prefix: PREFIX.into(),
                max_key_bytes: LONGEST_NAME,
                ..Config::default()
            }
        }

        fn ticket() -> impl Strategy<Value = Ticket> {
            let day = MAX_TTL.as_millis() as u64;
            let ttl = 10..=day;
            let renew_every = prop::option::of(1..10_u64);
            let max_hold = prop::option::of(10..1_000_000_000_000_u64);
            let numbers = (ttl, renew_every, max_hold, 0..=day, 0..=MAX_TOKEN);
            (fuzz::lease(), numbers, "[a-zA-Zé:][a-z 0-9é~]{0,20}").prop_map(
                |(lease, (ttl, renew_every, max_hold, key_left, token), name)| Ticket {
                    key: Key::new(PREFIX, &name, LONGEST_NAME).unwrap(),
                    lease,
                    token,
                    options: Options {
                        min_hold: Duration::ZERO,
                        mode: Mode::Exclusive,
                        ttl: Duration::from_millis(ttl),
                        renew_every: renew_every.map(Duration::from_millis),
                        max_hold: max_hold.map(Duration::from_millis),
                        checked: false,
                        replicas: None,
                    },
                    key_left: Duration::from_millis(key_left),
                },
            )
        }

        proptest! {
            #[test]
            fn fuzz_a_written_ticket_is_read_back(ticket in ticket()) {
                prop_assert_eq!(Ticket::read(&ticket.to_string(), &config()).unwrap(), ticket);
            }

            #[test]
            fn fuzz_only_written_tickets_are_accepted(
                Bytes(bytes) in fuzz::bytes_like(ticket().prop_map(|ticket| ticket.to_string())),
            ) {
                let text = String::from_utf8_lossy(&bytes);
                match Ticket::read(&text, &config()) {
                    Ok(read) => {
                        prop_assert_eq!(read.to_string(), text.trim_end_matches(['\n', '\r']));
                        prop_assert!(read.key.name().len() <= LONGEST_NAME);
                        prop_assert!(read.options.ttl.max(read.key_left) <= MAX_TTL);
                    }
                    Err(error) => {
                        let message = error.to_string();
                        prop_assert!(message.len() <= 1000, "{} bytes: {message:.200}", message.len());
                        prop_assert!(!message.contains(char::is_control), "{message:?}");
                    }
                }
            }
        }
    }
}
