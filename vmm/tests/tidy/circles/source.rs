//! Names that the text of a module defines, imports and uses.

use std::collections::BTreeSet;

use proc_macro2::{Delimiter, TokenStream, TokenTree};

use crate::rust::is_mark;

/// A name that a `use` declaration brings into its file.
pub(super) struct Import {
    pub(super) path: Vec<String>,
    pub(super) name: String,
    pub(super) is_public: bool,
}

/// Names in the text of a module.
#[derive(Default)]
pub(super) struct Source {
    /// Modules in files of their own.
    pub(super) modules: Vec<String>,
    pub(super) defined: BTreeSet<String>,
    pub(super) imports: Vec<Import>,
    /// Paths of two segments or more, outside `use`.
    pub(super) paths: Vec<Vec<String>>,
    /// Identifiers and keywords outside items of tests.
    pub(super) words: BTreeSet<String>,
}

impl Source {
    pub(super) fn read(&mut self, tokens: TokenStream) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let mut at = 0;
        while let Some(token) = tokens.get(at) {
            let after = &tokens[at + 1..];
            at += 1;
            at += match token {
                TokenTree::Punct(hash) if hash.as_char() == '#' => self.attribute(after),
                TokenTree::Group(group) => {
                    self.read(group.stream());
                    0
                }
                TokenTree::Ident(word) => self.word(&word.to_string(), &tokens[..at - 1], after),
                TokenTree::Punct(_) | TokenTree::Literal(_) => 0,
            };
        }
    }

    /// Passes over an item of tests; returns the number of tokens.
    fn attribute(&self, after: &[TokenTree]) -> usize {
        let Some(TokenTree::Group(group)) = after.first() else { return 0 };
        let text: String = group.stream().to_string().split_whitespace().collect();
        if text != "cfg(test)" && !text.starts_with("cfg(all(test,") {
            return 0;
        }
        let is_end = |token: &TokenTree| match token {
            TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
            token => is_mark(token, ';'),
        };
        after.iter().position(is_end).map_or(after.len(), |end| end + 1)
    }

    /// Reads what begins with `word`; returns the number of tokens after it that were read.
    fn word(&mut self, word: &str, before: &[TokenTree], after: &[TokenTree]) -> usize {
        self.words.insert(word.to_owned());
        match (word, after) {
            ("use", [first, ..]) if !is_mark(first, '<') => {
                let end = after.iter().position(|token| is_mark(token, ';')).unwrap_or(after.len());
                let is_public = match before {
                    [.., TokenTree::Ident(word)] => word == "pub",
                    [.., TokenTree::Ident(word), TokenTree::Group(_)] => word == "pub",
                    _ => false,
                };
                self.import(&after[..end], &[], is_public);
                end
            }
            ("mod", [TokenTree::Ident(name), end, ..]) if is_mark(end, ';') => {
                self.modules.push(name.to_string());
                2
            }
            ("macro_rules", [_, TokenTree::Ident(name), ..])
            | ("static", [TokenTree::Ident(_), TokenTree::Ident(name), ..]) => {
                self.defined.insert(name.to_string());
                2
            }
            (
                "fn" | "struct" | "enum" | "trait" | "const" | "static" | "type" | "union",
                [TokenTree::Ident(name), ..],
            ) => {
                self.defined.insert(name.to_string());
                0
            }
            _ => self.path(word, after),
        }
    }

    /// Reads the rest of a path that begins with `first`; returns the number of tokens.
    fn path(&mut self, first: &str, after: &[TokenTree]) -> usize {
        let mut path = vec![first.to_owned()];
        let mut rest = after;
        while let [one, other, TokenTree::Ident(name), more @ ..] = rest
            && is_mark(one, ':')
            && is_mark(other, ':')
        {
            path.push(name.to_string());
            rest = more;
        }
        if path.len() > 1 {
            self.paths.push(path);
        }
        after.len() - rest.len()
    }

    /// Reads a tree of a `use` declaration below `above`.
    fn import(&mut self, tree: &[TokenTree], above: &[String], is_public: bool) {
        let mut path = above.to_vec();
        let mut alias = None;
        for (at, token) in tree.iter().enumerate() {
            match token {
                TokenTree::Ident(word) if word == "as" => alias = tree.get(at + 1).map(ToString::to_string),
                TokenTree::Ident(word) if alias.is_none() => path.push(word.to_string()),
                token if is_mark(token, '*') => path.push("*".to_owned()),
                TokenTree::Group(group) => {
                    let trees: Vec<TokenTree> = group.stream().into_iter().collect();
                    let trees = trees.split(|token| is_mark(token, ',')).filter(|tree| !tree.is_empty());
                    return trees.for_each(|tree| self.import(tree, &path, is_public));
                }
                _ => {}
            }
        }
        if path.len() > 1 && path.last().is_some_and(|last| last == "self") {
            path.pop();
        }
        if let Some(name) = alias.or_else(|| path.last().cloned()) {
            self.imports.push(Import { path, name, is_public });
        }
    }
}
