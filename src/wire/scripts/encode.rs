//! Encodes script calls and other commands as RESP.

use crate::command::encoder::Encoder;
use crate::command::script::{FurtherKeys, Script};
use crate::command::{CallContext, Command};
use crate::config::other_library::python_signal;
use crate::wire::scripts::{ScriptContext, ScriptRef};

/// Appends one call of `script` for `commands`, which all have this script, to `buffer`. On a Cluster, their keys have
/// the same slot.
pub fn encode<'a>(
    buffer: &mut Vec<u8>,
    call: ScriptRef<'_>,
    script: &Script,
    context: &ScriptContext,
    commands: impl ExactSizeIterator<Item = &'a Command> + Clone,
) {
    let layout = script.layout;
    let queued = commands.clone().filter(|command| command.has_queue_key());
    let queue_count = queued.clone().count();
    let (counter, mark) = (usize::from(layout.counter), usize::from(layout.mark));
    let mark_at_end = usize::from(layout.mark_at_end && context.quarantine.is_some());
    let values = commands.clone().filter_map(Command::value_key);
    let value_count = values.clone().count();
    let further_count = layout.further.map_or(0, |_| commands.len());
    let keys =
        commands.len() + queue_count + value_count + counter + mark + mark_at_end + further_count;
    let fixed_args = usize::from(layout.holder) + usize::from(layout.limit) + mark + mark_at_end;
    let may_notify = layout.shard_channel && queue_count > 0;
    let shard = context.shard_channel_start().filter(|_| may_notify);
    let args = commands.len() * layout.arguments + fixed_args + usize::from(shard.is_some());
    let mut out = Encoder(buffer);
    out.array(3 + keys + args);
    match call {
        ScriptRef::Hash(hash) => {
            out.text("EVALSHA");
            out.text(hash);
        }
        ScriptRef::Text(text) => {
            out.text("EVAL");
            out.text(text);
        }
    }
    out.number(keys as u64);
    if layout.counter {
        let key = commands.clone().find_map(Command::key);
        let tag = key.map_or("", |key| key.fence_tag(context.layout));
        out.parts(&[&context.fence_counter, tag]);
    }
    if layout.mark {
        out.text(&context.data_mark);
    }
    for command in commands.clone() {
        out.text(command.key().map_or("", |key| key.in_redis()));
    }
    for key in queued.filter_map(Command::key) {
        out.parts(&key.queue_parts(context.layout));
    }
    for key in values {
        out.text(key.in_redis());
    }
    if mark_at_end > 0 {
        out.text(&context.data_mark);
    }
    if layout.further == Some(FurtherKeys::Signals) {
        for key in commands.clone().filter_map(Command::key) {
            out.parts(&python_signal(key.in_redis()));
        }
    }
    if layout.holder {
        out.text(context.holder.as_str());
    }
    if layout.mark {
        out.millis(context.quarantine());
    }
    if layout.limit {
        out.number(context.max_value as u64);
    }
    let of_call = CallContext {
        holder: &context.holder,
        quarantine: context.quarantine(),
    };
    for command in commands {
        command.arguments(&mut out, of_call);
    }
    if let Some(shard) = shard {
        out.text(&shard);
    }
    if mark_at_end > 0 {
        out.millis(context.quarantine());
    }
}

/// Appends a command that is no script call.
pub fn encode_words<'a>(
    buffer: &mut Vec<u8>,
    command: &str,
    words: impl ExactSizeIterator<Item = &'a str>,
) {
    let mut out = Encoder(buffer);
    out.array(1 + words.len());
    out.text(command);
    words.for_each(|word| out.text(word));
}
