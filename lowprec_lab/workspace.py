"""The learner's folder: where it is, chapters opened in it and updated, answers saved."""

from lowprec_lab.answers import Answers, SavedAnswer, load_answers, save_answer
from lowprec_lab.files import WorkspaceError, work_folder

__all__ = ["Answers", "SavedAnswer", "WorkspaceError", "load_answers", "save_answer", "work_folder"]
